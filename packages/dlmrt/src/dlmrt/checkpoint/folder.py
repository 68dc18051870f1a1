"""A model folder's settings: config.json and generation_config.json, parsed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlmrt.checkpoint.quantization import MODELOPT_FILE, Quantization, parse_quantization
from dlmrt.decoding import DecoderSettings, settings_from_json
from dlmrt.errors import CheckpointError, ModelConfigError
from dlmrt.models import MODELS
from dlmrt.models.base import BlockModel, ModelConfig


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request gets where it says nothing.

    stop_ids        tokens that end an answer
    max_new_tokens  None: as much as the context has left
    """

    decoder: DecoderSettings
    stop_ids: tuple[int, ...] = ()
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Parsed settings of a checkpoint. quantization: how its files hold the projections; None as they are."""

    model_class: type[BlockModel]
    config: ModelConfig
    defaults: Defaults
    quantization: Quantization | None = None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError if the file is missing or no JSON object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return raw


def read_folder(folder: Path) -> ModelFolder:
    """Settings of a checkpoint folder; all files but config.json may be missing. Raises CheckpointError."""
    config = read_json(folder / "config.json")
    generation, modelopt = (_read_optional(folder / name) for name in ("generation_config.json", MODELOPT_FILE))
    return replace(parse_settings(config, generation), quantization=parse_quantization(config, modelopt))


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def parse_settings(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelFolder:
    """The same from the two JSON objects themselves."""
    kind = config.get("model_type")
    if kind not in MODELS:
        raise ModelConfigError(f"config.json has model_type = {kind!r}; the engine runs {sorted(MODELS)}")
    model_class = MODELS[kind]
    parsed = model_class.config_class.from_json(config)
    stop = generation.get("eos_token_id", config.get("eos_token_id"))
    stop_ids = () if stop is None else tuple(stop) if isinstance(stop, list | tuple) else (stop,)
    if not all(isinstance(token, int) and 0 <= token < parsed.spec.vocab_size for token in stop_ids):
        raise ModelConfigError(f"eos_token_id is {stop!r}; it must hold token ids below {parsed.spec.vocab_size}")
    limit = generation.get("max_new_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ModelConfigError(f"generation_config.json has max_new_tokens = {limit!r}; it must be an integer >= 1")
    decoder = settings_from_json(parsed.decoder_defaults(generation))
    return ModelFolder(model_class, parsed, Defaults(decoder, stop_ids, limit))
