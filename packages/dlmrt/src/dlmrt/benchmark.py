"""Measuring an engine on a fixed list of prompts, one request at a time."""

import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dlmrt.checkpoint.embedded import PREFIX
from dlmrt.checkpoint.folder import read_folder
from dlmrt.checkpoint.weights import load_tensors
from dlmrt.devices import pick_device, pick_dtype
from dlmrt.engine import Engine
from dlmrt.errors import DlmrtError
from dlmrt.params import GenerationParams

_SYNTHETIC_PROMPT, _SYNTHETIC_ANSWER = 64, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """latency_*: seconds of a whole request. tokens_per_second, forwards_per_second: over all requests' time.
    peak_memory_bytes: of the process, or of the GPU's allocations. workload: what was asked."""

    model: str
    workload: str
    requests: int
    tokens: int
    tokens_per_second: float
    tpf: float
    tpf_commit: float
    forwards_per_second: float
    latency_p50: float
    latency_p95: float
    peak_memory_bytes: int | None
    device: str
    dtype: str
    driver: str
    threads: int
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """(label, value) pairs for people."""
        memory = "unknown" if self.peak_memory_bytes is None else f"{self.peak_memory_bytes / 2**20:.0f} MiB"
        return [
            ("model", f"{self.model}, {self.dtype} on {self.device}, {self.threads} threads, {self.driver} driver"),
            ("workload", f"{self.requests} requests: {self.workload}"),
            ("tokens/s", f"{self.tokens_per_second:.1f}"),
            ("TPF", f"{self.tpf:.2f} ({self.tpf_commit:.2f} with commits)"),
            ("forwards/s", f"{self.forwards_per_second:.1f}"),
            ("latency", f"p50 {self.latency_p50 * 1e3:.1f} ms, p95 {self.latency_p95 * 1e3:.1f} ms"),
            ("peak memory", memory),
            ("versions", ", ".join(f"{name} {number}" for name, number in self.versions.items())),
        ]


def measure(engine: Engine, params: GenerationParams, *, prompts: int, repeat: int) -> BenchReport:
    """Answers each of `prompts` prompts `repeat` times, after one request to warm up.

    Raises DlmrtError if the model produced no token at all.
    """
    if engine.name.startswith(PREFIX):
        workload, params, requests = _word_problems(engine, params, prompts)
    else:
        workload, params, requests = _synthetic(engine, params, prompts)
    engine.generate(ids=requests[0], params=params)
    results, seconds = [], []
    for ids in requests * repeat:
        began = time.perf_counter()
        results.append(engine.generate(ids=ids, params=params))
        seconds.append(time.perf_counter() - began)
    tokens, forwards = sum(len(r.token_ids) for r in results), sum(r.forwards for r in results)
    if not tokens:
        raise DlmrtError("the benchmark produced no token")
    return BenchReport(
        model=engine.name,
        workload=workload,
        requests=len(results),
        tokens=tokens,
        tokens_per_second=tokens / sum(seconds),
        tpf=tokens / forwards,
        tpf_commit=tokens / (forwards + sum(len(r.blocks) for r in results)),
        forwards_per_second=forwards / sum(seconds),
        latency_p50=percentile(seconds, 50),
        latency_p95=percentile(seconds, 95),
        peak_memory_bytes=_peak_memory(engine.model.device),
        device=device_name(engine.model.device),
        dtype=str(engine.model.dtype).removeprefix("torch."),
        driver=engine.driver.name,
        threads=torch.get_num_threads(),
        versions=versions(),
    )


def random_engine(name: str, folder: Path, *, device: str, dtype: str, driver: str) -> Engine:
    """An engine over a checkpoint without tokenizer. Arguments as in `Engine.from_pretrained`."""
    settings, device = read_folder(folder), pick_device(device)
    tensors = load_tensors(folder, settings.config, device, pick_dtype(dtype, device))
    model = settings.model_class.from_tensors(settings.config, tensors, fuse=True)
    return Engine(model, None, settings.defaults, name=name, driver=driver)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100).__int__() - 1)]


def _word_problems(engine: Engine, params: GenerationParams, count: int):
    from orl_core.arithmetic import problems

    assert engine.codec is not None
    requests = [engine.codec.encode_prompt(problem.prompt) for problem in problems("test", count)]
    return "held-out arithmetic word problems", params, requests


def _synthetic(engine: Engine, params: GenerationParams, count: int):
    """Random token ids; answers run to their full length, since end tokens come at random."""
    spec = engine.model.spec
    answer = params.max_new_tokens or min(_SYNTHETIC_ANSWER, max(1, engine.context // 2))
    length = max(1, min(_SYNTHETIC_PROMPT, engine.context - answer))
    generator = torch.Generator().manual_seed(0)
    requests = torch.randint(spec.vocab_size, (count, length), generator=generator).tolist()
    params = replace(params, max_new_tokens=answer, ignore_eos=True)
    return f"{length} random tokens in, {answer} out, end tokens ignored", params, requests


def _peak_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_name(device: torch.device) -> str:
    """The GPU's name, or the kind of processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def versions() -> dict[str, str]:
    """Of the packages that a measurement depends on."""
    import dlmrt
    import orl_core

    return {
        "dlmrt": dlmrt.__version__,
        "orl-core": orl_core.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
