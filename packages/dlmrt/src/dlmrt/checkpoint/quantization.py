"""Which quantisation a checkpoint declares: NVFP4 in the dialect of compressed-tensors or of ModelOpt, or none.

compressed-tensors: config.json `quantization_config` with format `nvfp4-pack-quantized`
ModelOpt: `quantization_config` with quant_method `modelopt`, or hf_quant_config.json
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dlmrt.errors import QuantizationError
from orl_core.nvfp4 import GROUP, Dialect

MODELOPT_FILE = "hf_quant_config.json"
_FORMAT = "nvfp4-pack-quantized"
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
_SUPPORTED = (
    f"the engine reads NVFP4 of compressed-tensors (format {_FORMAT}) and of ModelOpt (quant_algo "
    f"{' or '.join(_ALGORITHMS)}), or load the unquantised checkpoint; `dlmrt quantize` makes NVFP4 of that"
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """A checkpoint's NVFP4 settings.

    targets  modules that are quantised: names or "re:" patterns, or the class "Linear", which stands for all
    ignore   modules that are not, in the dialect's own syntax
    """

    dialect: Dialect
    targets: tuple[str, ...] = ("Linear",)
    ignore: tuple[str, ...] = ()

    def ignores(self, module: str) -> bool:
        """Whether the ignore list names a module, such as "model.layers.0.mlp.up_proj"."""
        match = _matches if self.dialect == "compressed-tensors" else _matches_modelopt
        return any(match(module, pattern) for pattern in self.ignore)

    def covers(self, module: str) -> bool:
        """Whether a linear module is to be quantised."""
        targeted = any(target == "Linear" or _matches(module, target) for target in self.targets)
        return targeted and not self.ignores(module)


def _matches(module: str, pattern: str) -> bool:
    """compressed-tensors: the name itself, or after "re:" a regular expression of its beginning."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern


def _matches_modelopt(module: str, pattern: str) -> bool:
    """ModelOpt: shell wildcards, or components of the name one after another, such as that of a parent module."""
    return fnmatchcase(module, pattern) or f".{pattern}." in f".{module}."


def parse_quantization(config: Mapping[str, Any], modelopt: Mapping[str, Any]) -> Quantization | None:
    """From config.json and, where there is one, hf_quant_config.json. None: the checkpoint is not quantised.

    Raises QuantizationError for a method or format that the engine does not read.
    """
    file, raw = "config.json", config.get("quantization_config")
    if raw is None and modelopt:
        file, raw = MODELOPT_FILE, modelopt.get("quantization")
    elif raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise QuantizationError(f"{file} describes its quantisation as {raw!r}; {_SUPPORTED}")
    if isinstance(raw.get("quantization"), Mapping):  # hf_quant_config.json copied into config.json as it is
        raw = {"quant_method": "modelopt", **raw["quantization"]}
    method = raw.get("quant_method", "modelopt" if "quant_algo" in raw else None)
    try:
        if method == "compressed-tensors":
            return _compressed_tensors(file, raw)
        if method in ("modelopt", "modelopt_fp4"):
            return _modelopt(file, raw)
    except re.error as error:
        raise QuantizationError(f"{file} has a pattern that is no regular expression: {error}") from error
    raise QuantizationError(f"{file} has quant_method = {method!r}; {_SUPPORTED}")


def _compressed_tensors(file: str, raw: Mapping[str, Any]) -> Quantization:
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise QuantizationError(f"{file} has no config_groups, which say what is quantised; {_SUPPORTED}")
    targets: list[str] = []
    for name, group in groups.items():
        group = group if isinstance(group, Mapping) else {}
        layout, weights = group.get("format") or raw.get("format"), group.get("weights") or {}
        scheme = tuple(weights.get(key) for key in ("num_bits", "type", "group_size"))
        if layout != _FORMAT or scheme != (4, "float", GROUP) or not weights.get("symmetric", True):
            raise QuantizationError(
                f"{file} has config_groups.{name} in format {layout!r} with weights of {scheme[0]!r} bits, type "
                f"{scheme[1]!r}, in groups of {scheme[2]!r}; {_SUPPORTED}"
            )
        targets += _strings(file, "targets", group.get("targets"))
    for key in ("transform_config", "sparsity_config"):
        if raw.get(key):
            raise QuantizationError(f"{file} has {key}, which the engine does not apply; {_SUPPORTED}")
    return _checked(Quantization("compressed-tensors", tuple(targets), _strings(file, "ignore", raw.get("ignore"))))


def _modelopt(file: str, raw: Mapping[str, Any]) -> Quantization:
    algorithm, group = raw.get("quant_algo"), raw.get("group_size", GROUP)
    if algorithm not in _ALGORITHMS or group != GROUP:
        raise QuantizationError(f"{file} has quant_algo = {algorithm!r} in groups of {group}; {_SUPPORTED}")
    ignore = raw.get("ignore") if raw.get("ignore") is not None else raw.get("exclude_modules")
    return Quantization("modelopt", ignore=_strings(file, "ignore", ignore))


def _strings(file: str, key: str, value: Any) -> tuple[str, ...]:
    value = value or []
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise QuantizationError(f"{file} has {key} = {value!r} in its quantisation; it must be a list of names")
    return tuple(value)


def _checked(quantization: Quantization) -> Quantization:
    """Compiles its patterns once, so that a faulty one is found here."""
    for pattern in (*quantization.targets, *quantization.ignore):
        _matches("", pattern)
    return quantization


def settings_json(
    dialect: Dialect, ignore: list[str], producer: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """`quantization_config` of a weight-only checkpoint, and for ModelOpt the content of hf_quant_config.json.

    ignore: linear modules that are not quantised. The layouts are those that the libraries write for weights in NVFP4
    beside activations that are not quantised: compressed-tensors' preset NVFP4A16, ModelOpt's W4A16_NVFP4.
    """
    weights = {"num_bits": 4, "type": "float", "group_size": GROUP, "dynamic": False}
    if dialect == "compressed-tensors":
        weights |= {"symmetric": True, "strategy": "tensor_group"}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        settings = {"quant_method": dialect, "format": _FORMAT, "quantization_status": "compressed"}
        settings |= {"config_groups": {"group_0": group}, "ignore": ignore, "kv_cache_scheme": None}
        return settings, None
    own = {"quant_algo": _ALGORITHMS[1], "kv_cache_quant_algo": None, "group_size": GROUP, "exclude_modules": ignore}
    settings = {"quant_method": dialect, "quant_algo": _ALGORITHMS[1], "producer": producer, "ignore": ignore}
    settings["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return settings, {"producer": producer, "quantization": own}
