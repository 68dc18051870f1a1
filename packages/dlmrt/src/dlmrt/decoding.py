"""Which decoder a request gets: the checkpoint's default settings, overridden by the request's."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dlmrt.errors import ModelConfigError, RequestError
from dlmrt.models.base import BlockSpec
from dlmrt.params import GenerationParams
from dlmrt.truncation import Truncation
from orl_core.decoders import Decoder, DraftEdit, EntropyBound, InsertDelete, Threshold
from orl_core.errors import OrlError

DECODERS: dict[str, type[EntropyBound] | type[Threshold] | type[DraftEdit] | type[InsertDelete]] = {
    "entropy_bound": EntropyBound,
    "threshold": Threshold,
    "draft_edit": DraftEdit,
    "insert_delete": InsertDelete,
}
_FROM_MODEL = {"vocab_size", "mask_id", "canvas_length"}


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """A decoder's name and the settings that differ from orl-core's defaults."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


# The modes of LLaDA2.1 as published: few edits of tokens drafted with care, and many of tokens drafted in haste.
PRESETS = {
    "draft_edit_quality": DecoderSettings("draft_edit", {"threshold": 0.7, "edit_threshold": 0.5}),
    "draft_edit_speed": DecoderSettings("draft_edit", {"threshold": 0.5, "edit_threshold": 0.0}),
}
_NAMES = [*DECODERS, *PRESETS]


def option_names(name: str) -> set[str]:
    """Settings of a decoder that are not given by the model."""
    return {field.name for field in fields(DECODERS[name])} - _FROM_MODEL


def settings_from_json(raw: Mapping[str, Any]) -> DecoderSettings:
    """The `decoder` object of a generation_config.json: its name or that of a preset, and keyword settings."""
    name, options = raw.get("name"), {key: value for key, value in raw.items() if key != "name"}
    if name in PRESETS:
        name, options = PRESETS[name].name, {**PRESETS[name].options, **options}
    if name not in DECODERS:
        raise ModelConfigError(f"generation_config.json has decoder.name = {name!r}; choose one of {_NAMES}")
    unknown = set(options) - option_names(name)
    if unknown:
        raise ModelConfigError(
            f"generation_config.json has decoder settings {sorted(unknown)}, which {name} does not have; "
            f"it has {sorted(option_names(name))}"
        )
    return DecoderSettings(name, options)


def build_decoder(spec: BlockSpec, default: DecoderSettings, params: GenerationParams) -> Decoder:
    """Raises RequestError for an unknown decoder, one of the other family, a foreign or an out-of-range setting."""
    name = params.decoder or default.name
    if name in PRESETS:
        default, name = PRESETS[name], PRESETS[name].name
    if name not in DECODERS:
        raise RequestError(f"decoder {name!r} is unknown; choose one of {_NAMES}")
    requested = params.decoder_options()
    foreign = sorted(set(requested) - option_names(name))
    if foreign:
        raise RequestError(
            f"decoder {name} has no setting {', '.join(foreign)}; it has {', '.join(sorted(option_names(name)))}"
        )
    options: dict[str, Any] = {**(default.options if name == default.name else {}), **requested}
    if params.temperature is not None:
        options |= _temperature_options(name, params.temperature, requested)
    if params.edit_blocks and name != "draft_edit":
        raise RequestError(f"decoder {name} has no edit_blocks; only draft_edit can revise finished blocks")
    family = "uniform" if name == "entropy_bound" else "masked"
    if family != spec.family:
        fitting = [other for other in DECODERS if (other == "entropy_bound") == (spec.family == "uniform")]
        raise RequestError(
            f"decoder {name} works on {family}-family models and this one is of the {spec.family} family; "
            f"choose one of {fitting}"
        )
    if name == "entropy_bound":
        options["vocab_size"] = spec.vocab_size
    else:
        length = spec.canvas_length * (1 + params.edit_blocks)
        options |= {"mask_id": spec.mask_token_id, "canvas_length": length}
    if name == "insert_delete":
        options = _control_tokens(spec, options) | options
    try:
        return DECODERS[name](**options)
    except OrlError as error:
        raise RequestError(str(error)) from error


def build_truncation(decoder: Decoder, params: GenerationParams) -> Truncation | None:
    """Raises RequestError if top_k or top_p is asked of a decoder that does not sample."""
    asked = [name for name in ("top_k", "top_p") if getattr(params, name) is not None]
    if not asked:
        return None
    if decoder.greedy:
        raise RequestError(
            f"{' and '.join(asked)} choose what is sampled, and this request is greedy; set a temperature above 0"
        )
    return Truncation(params.top_k, params.top_p)


def _control_tokens(spec: BlockSpec, options: Mapping[str, Any]) -> dict[str, int]:
    declared = {"delete_id": spec.delete_token_id, "insert_id": spec.insert_token_id}
    tokens = {name: token for name, value in declared.items() if (token := options.get(name, value)) is not None}
    if len(tokens) < len(declared):
        raise RequestError(
            "decoder insert_delete needs two control tokens that this checkpoint does not declare: delete_token_id and "
            "insert_token_id in config.json, or delete_id and insert_id beside decoder.name in generation_config.json"
        )
    for name, token in tokens.items():
        if not 0 <= token < spec.vocab_size:
            raise RequestError(f"the checkpoint declares {name} = {token}; token ids lie in [0, {spec.vocab_size - 1}]")
    return tokens


def _temperature_options(name: str, temperature: float, requested: Mapping[str, Any]) -> dict[str, Any]:
    if name != "entropy_bound":
        return {"sampling_temperature": temperature}
    if temperature == 0:
        return {"greedy": True}
    scheduled = sorted({"t_min", "t_max"} & set(requested))
    if scheduled:
        raise RequestError(f"temperature and {', '.join(scheduled)} exclude each other; give one of them")
    return {"greedy": False, "t_min": temperature, "t_max": temperature}
