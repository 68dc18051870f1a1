"""Devices and number formats, by name."""

import torch

from dlmrt.errors import RequestError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> str:
    """ "auto" is the GPU if there is one. Raises RequestError for a device that is unknown or absent."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RequestError(f"device {name!r} is unknown; choose auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RequestError(f"device {name!r} is not there; this machine has {torch.cuda.device_count()} CUDA devices")
    return name


def pick_dtype(name: str, device: str) -> torch.dtype | None:
    """The dtype to convert weights to, None to keep them as they are stored. "auto" computes in float32 on a CPU,
    where narrower formats are slower. Raises RequestError for an unknown name."""
    if name == "auto":
        return torch.float32 if device == "cpu" else None
    if name not in _DTYPES:
        raise RequestError(f"dtype {name!r} is unknown; choose one of {['auto', *_DTYPES]}")
    return _DTYPES[name]
