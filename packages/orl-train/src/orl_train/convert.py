"""Turns a Qwen3 checkpoint into a QwenDLM start model: the same weights under a configuration of block diffusion, and a
residual adapter that changes nothing until it is trained."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from orl_core.errors import ConfigError, require_at_least
from orl_core.noise import Family
from orl_core.residual import ResidualAdapter
from orl_train.checkpoint import write_folder, write_json
from orl_train.errors import CheckpointError
from orl_train.generation import default_decoder
from orl_train.mask_token import choose_mask_token
from orl_train.models.qwen_dlm import QwenDLMConfig, QwenDLMForBlockDiffusion
from orl_train.optim import RESIDUAL_PREFIX
from orl_train.source import Source, SourceTensor

_TOKENIZER_FILES = (
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# what neither the trainer's block masks nor dlmrt compute
_ONLY = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "quantization_config": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """mask_token: for the masked family, see `choose_mask_token`.
    residual_size: width of the residual adapter; None = twice the model's width, 0 = no adapter."""

    canvas_length: int = 256
    family: Family = "uniform"
    mask_token: str | None = None
    residual_size: int | None = None

    def __post_init__(self) -> None:
        require_at_least("canvas_length", self.canvas_length, 1)
        if self.family not in ("uniform", "masked"):
            raise ConfigError(f"family is {self.family!r}; it must be 'uniform' or 'masked'")
        if self.family == "uniform" and self.mask_token is not None:
            raise ConfigError(f"mask_token is {self.mask_token!r}; only the masked family has a mask token")
        if self.residual_size is not None:
            require_at_least("residual_size", self.residual_size, 0)


def convert(
    source: str,
    out: Path,
    config: ConvertConfig | None = None,
    *,
    revision: str | None = None,
    force: bool = False,
) -> Path:
    """Writes the QwenDLM folder `out` from the Qwen3 folder or hub id `source`; returns `out`. All or nothing.

    Weights are copied file by file, bit for bit. force: replaces a model folder at `out`.
    Raises ConfigError, CheckpointError.
    """
    config = config or ConvertConfig()
    files = Source(source, revision)
    _check_target(out, files, force)
    files.require("config.json", "a model is a folder in the Hugging Face layout, or a hub id")
    raw = _model_config(files.json("config.json"), config, source)
    tensors = files.tensors()
    _check_tensors(raw, tensors, source)
    tokenizer_file = files.require("tokenizer.json", "save its tokenizer in the fast format (save_pretrained)")
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{tokenizer_file} cannot be read: {error}") from error
    tokenizer_config = files.json("tokenizer_config.json")
    generation = _generation_config(raw, files.json("generation_config.json"), tokenizer, tokenizer_config)
    before = tokenizer.get_vocab_size()
    if config.family == "masked":
        name, raw["mask_token_id"] = choose_mask_token(
            tokenizer, raw["vocab_size"], config.mask_token, _ends(generation)
        )
        tokenizer_config["mask_token"] = name
    copies = [found for found in map(files.find, _TOKENIZER_FILES) if found is not None]

    def write(folder: Path) -> None:
        _write_weights(folder, tensors, raw)
        write_json(folder / "config.json", raw)
        write_json(folder / "generation_config.json", generation)
        if tokenizer_config:
            write_json(folder / "tokenizer_config.json", tokenizer_config)
        for path in copies:
            shutil.copyfile(path, folder / path.name)
        if tokenizer.get_vocab_size() > before:
            tokenizer.save(str(folder / "tokenizer.json"))
        else:
            shutil.copyfile(tokenizer_file, folder / "tokenizer.json")

    write_folder(out, write)
    return out


def _check_target(out: Path, files: Source, force: bool) -> None:
    if files.folder is not None and out.resolve() == files.folder.resolve():
        raise ConfigError(f"{out} is the source; choose another folder for the result")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / "config.json").is_file():
        raise ConfigError(f"{out} exists and is no model folder; choose another one")
    if not force:
        raise ConfigError(f"{out} exists; choose another folder, or give --force to replace the model in it")


def _model_config(raw: dict[str, Any], config: ConvertConfig, source: str) -> dict[str, Any]:
    """config.json of the result."""
    kind = raw.get("model_type")
    if kind != "qwen3":
        already = "; it is a QwenDLM model already" if kind == "qwen_dlm" else ""
        raise ConfigError(f"{source} has model_type {kind!r}; only dense Qwen3 checkpoints ('qwen3') convert{already}")
    for key, only in _ONLY.items():
        if raw.get(key, only) != only:
            raise ConfigError(f"{source} has {key} = {raw[key]!r} in its config.json; only {only!r} converts")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ConfigError(f"{source} scales its rotary embedding ({rope}); only the plain one converts")
    for key in ("hidden_size", "vocab_size"):
        if not isinstance(raw.get(key), int):
            raise ConfigError(f"{source} has {key} = {raw.get(key)!r} in its config.json; it must be an integer")
    residual = 2 * raw["hidden_size"] if config.residual_size is None else config.residual_size
    return raw | {
        "architectures": ["QwenDLMForBlockDiffusion"],
        "model_type": "qwen_dlm",
        "canvas_length": config.canvas_length,
        "state_family": config.family,
        "mask_token_id": None,
        "residual_intermediate_size": residual,
    }


def _check_tensors(raw: dict[str, Any], tensors: dict[str, SourceTensor], source: str) -> None:
    """Raises CheckpointError unless the tensors are exactly those of the configuration."""
    plain = raw | {"residual_intermediate_size": 0, "state_family": "uniform"}
    try:
        with torch.device("meta"):
            model = QwenDLMForBlockDiffusion(QwenDLMConfig.from_dict(plain))
    except (TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"the config.json of {source} describes no model: {error}") from error
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    problems = [f"{name} is missing" for name in wanted if name not in tensors and name not in tied]
    problems += [f"{name} is unexpected" for name in tensors if name not in wanted and name not in tied]
    problems += [
        f"{name} is {list(tensors[name].shape)} and must be {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"the tensors of {source} do not fit its config.json: {'; '.join(problems[:5])}{more}")


def _adapter(raw: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights of an adapter whose output is zero, seeded."""
    adapter = ResidualAdapter(raw["hidden_size"], raw["residual_intermediate_size"])
    generator = torch.Generator().manual_seed(0)
    for projection in (adapter.gate_proj, adapter.up_proj):
        nn.init.normal_(projection.weight, std=raw.get("initializer_range", 0.02), generator=generator)
    return {RESIDUAL_PREFIX + name: tensor.to(dtype) for name, tensor in adapter.state_dict().items()}


def _write_weights(folder: Path, tensors: dict[str, SourceTensor], raw: dict[str, Any]) -> None:
    """Copies the source's files and adds one for the adapter; several files come with an index."""
    sources = sorted({tensor.file for tensor in tensors.values()})
    with safe_open(tensors["model.norm.weight"].file, framework="pt") as opened:
        dtype = opened.get_tensor("model.norm.weight").dtype
    adapter = _adapter(raw, dtype) if raw["residual_intermediate_size"] else {}
    count = len(sources) + bool(adapter)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    for path, name in zip(sources, names, strict=False):
        shutil.copyfile(path, folder / name)
    if adapter:
        save_file(adapter, folder / names[-1], metadata={"format": "pt"})
    if count > 1:
        place = {name: names[sources.index(tensor.file)] for name, tensor in tensors.items()}
        place |= dict.fromkeys(adapter, names[-1])
        size = sum(tensor.nbytes for tensor in tensors.values()) + sum(tensor.nbytes for tensor in adapter.values())
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": place})


def _generation_config(
    raw: dict[str, Any], generation: dict[str, Any], tokenizer: Tokenizer, tokenizer_config: dict[str, Any]
) -> dict[str, Any]:
    """The source's end and padding tokens, and the decoder. Sampling settings are those of a causal model: dropped."""
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    pad = generation.get("pad_token_id", raw.get("pad_token_id"))
    if pad is None:
        token = tokenizer_config.get("pad_token")
        name = token.get("content") if isinstance(token, dict) else token
        pad = tokenizer.token_to_id(name) if name else None
    ends = _as_list(eos)
    if pad is None and ends:
        pad = ends[0]
    known = {"eos_token_id": eos, "pad_token_id": pad}
    return {key: value for key, value in known.items() if value is not None} | {
        "max_new_tokens": min(1024, raw.get("max_position_embeddings", 1024)),
        "decoder": default_decoder(raw["state_family"]),
    }


def _ends(generation: dict[str, Any]) -> list[int]:
    """Ids that end or pad an answer."""
    return _as_list(generation.get("eos_token_id")) + _as_list(generation.get("pad_token_id"))


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else ids if isinstance(ids, list) else [ids]
