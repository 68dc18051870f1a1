"""What a checkpoint is and how much memory it takes, from its configs and safetensors headers alone."""

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch

from dlmrt.checkpoint.folder import read_folder, read_json
from dlmrt.checkpoint.footprint import RANKS, Footprint, footprint, parameter_counts
from dlmrt.checkpoint.hub import resolve
from dlmrt.checkpoint.layout import Layout, layout
from dlmrt.checkpoint.weights import TensorEntry, check_files, main_dtype, read_headers
from dlmrt.decoding import build_decoder, option_names
from dlmrt.devices import pick_dtype
from dlmrt.errors import RequestError
from dlmrt.loop.decode import cache_capacity
from dlmrt.params import GenerationParams
from dlmrt.vocab import CHUNK

_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What `dlmrt info` shows.

    family: noise of the states. active_parameters: those that the forward of one token uses. decoder: its settings at
    default decoding. dtype: of the weights in memory. quantization: dialect of an NVFP4 checkpoint; its projections are
    expanded to `dtype` when it is loaded. stored_bytes: the model's tensors in the files. weight_bytes, kv_cache_bytes,
    step_bytes: memory of one request that fills `context` tokens (prompt and answer): weights, KV cache and the buffers
    of one step. plans: weights and KV cache on each of 1, 2, 4 and 8 devices, unquantised and in NVFP4.
    """

    model: str
    model_type: str
    family: str
    parameters: int
    active_parameters: int
    layers: int
    hidden_size: int
    vocab_size: int
    canvas_length: int
    max_context: int
    residual: bool
    decoder: dict[str, Any]
    dtype: str
    quantization: str | None
    stored_bytes: int
    context: int
    weight_bytes: int
    kv_cache_bytes: int
    step_bytes: int
    plans: tuple[Footprint, ...]

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_cache_bytes + self.step_bytes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total_bytes": self.total_bytes}

    def lines(self) -> list[tuple[str, str]]:
        """(label, value) pairs for people."""
        settings = ", ".join(f"{name} {self.decoder[name]}" for name in sorted(option_names(self.decoder["name"])))
        memory = (
            f"{self.total_bytes / _MIB:.1f} MiB at {self.context} tokens (weights {self.weight_bytes / _MIB:.1f}, "
            f"KV cache {self.kv_cache_bytes / _MIB:.1f}, step {self.step_bytes / _MIB:.1f})"
        )
        return [
            ("model", self.model),
            ("type", f"{self.model_type}, {self.family} family, residual {'on' if self.residual else 'none'}"),
            ("parameters", f"{self.parameters:,} in {self.layers} layers of width {self.hidden_size}, {self.dtype}"),
            *self._quantization_line(),
            ("active", f"{self.active_parameters:,} parameters a token"),
            ("vocabulary", f"{self.vocab_size:,}"),
            ("canvas", f"{self.canvas_length} tokens"),
            ("context", f"{self.max_context:,} tokens"),
            ("decoder", f"{self.decoder['name']}: {settings}"),
            ("memory", memory),
            *((f"{label} on", self._plan_line(nvfp4)) for label, nvfp4 in ((self.dtype, False), ("nvfp4", True))),
        ]

    def _quantization_line(self) -> list[tuple[str, str]]:
        if self.quantization is None:
            return []
        return [("quantised", f"nvfp4 ({self.quantization}), {_amount(self.stored_bytes)} stored; runs expanded")]

    def _plan_line(self, nvfp4: bool) -> str:
        sizes = (
            f"{plan.ranks}: {_amount(plan.weight_bytes + plan.kv_cache_bytes)}"
            for plan in self.plans
            if plan.nvfp4 == nvfp4
        )
        return f"{', '.join(sizes)} (devices: weights and KV cache on each)"


def describe(name: str, *, revision: str | None = None, context: int | None = None, dtype: str = "auto") -> Description:
    """context: tokens to plan for, the model's own maximum by default. Raises CheckpointError or RequestError."""
    folder = resolve(name, revision)
    settings, entries = read_folder(folder), read_headers(folder)
    spec, quantization = settings.config.spec, settings.quantization
    plan = layout(settings.config, entries, quantization)
    check_files(plan, entries, str(folder))
    context = context or spec.max_context
    if context > spec.max_context:
        raise RequestError(f"context is {context}; the model's is {spec.max_context}")
    converted = pick_dtype(dtype, "cuda")  # "auto" describes the checkpoint as it is stored
    main = converted or main_dtype(plan, entries)
    parameters, active = parameter_counts(settings.config)
    logits = 4 * min(CHUNK, spec.vocab_size)
    decoder = build_decoder(spec, settings.defaults.decoder, GenerationParams())
    return Description(
        model=name,
        model_type=read_json(folder / "config.json")["model_type"],
        family=spec.family,
        parameters=parameters,
        active_parameters=active,
        layers=len(spec.kv_layers),
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        canvas_length=spec.canvas_length,
        max_context=spec.max_context,
        residual=spec.has_residual,
        decoder={"name": settings.defaults.decoder.name, **asdict(decoder)},  # type: ignore[call-overload]
        dtype=str(main).removeprefix("torch."),
        quantization=quantization.dialect if quantization else None,
        stored_bytes=sum(entries[tensor].nbytes for tensor in plan.files()),
        context=context,
        weight_bytes=_weight_bytes(plan, entries, converted),
        kv_cache_bytes=spec.kv_bytes(cache_capacity(spec, 1, context - 1), main),
        step_bytes=spec.canvas_length * (logits * 3 + spec.hidden_size * 8),
        plans=tuple(
            footprint(settings.config, context=context, dtype=main, ranks=ranks, nvfp4=nvfp4)
            for nvfp4 in (False, True)
            for ranks in RANKS
        ),
    )


def _amount(size: int) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB"


def _weight_bytes(plan: Layout, entries: dict[str, TensorEntry], converted: torch.dtype | None) -> int:
    """Bytes of the weights in memory: NVFP4 expanded, other tensors as they are stored unless they are converted."""
    expanded = (converted or main_dtype(plan, entries)).itemsize
    return sum(
        prod(piece.shape) * expanded if piece.nvfp4 or converted else entries[piece.name].nbytes
        for parts in plan.pieces.values()
        for piece in parts
    )
