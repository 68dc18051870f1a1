"""The static KV cache, and spans: where the tokens of one forward lie in it and what each of them sees.

A key lies in the cache at its absolute position. A forward on T tokens writes their keys at [start, start + T) of each
row and lets each query see the keys with position < limit: a causal token has limit = position + 1, a block-causal one
the end of its block, a canvas token the end of its canvas. What lies beyond a limit (stale keys, padding) is not seen,
so a canvas may be written again at every step, and a commit overwrites it.

Shape legend: B rows, T tokens of the forward, S cache positions read, H key/value heads, D head width.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one forward.

    starts     position of each row's first token, known to the host
    positions  int64 [B, T]
    limit      int64 [B, T]  a query sees the keys with position < limit
    anchor     int64 [B, T]  sliding layers see the keys with position > anchor - window: the query's own position in a
               commit, the start of the canvas in a denoising step
    keys       cache positions that the forward reads, S = max(starts) + T
    sees_all   every query sees all S keys: attention needs no mask
    causal     plain causal attention from position 0: attention needs no mask either
    """

    starts: tuple[int, ...]
    positions: Tensor
    limit: Tensor
    anchor: Tensor
    keys: int
    sees_all: bool = False
    causal: bool = False
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def common_start(self) -> int | None:
        """The start of all rows, or None if they differ."""
        return self.starts[0] if len(set(self.starts)) == 1 else None

    @property
    def length(self) -> int:
        return self.positions.shape[1]

    def select(self, rows: Tensor) -> "Span":
        """The span of some of the rows (int64 [L])."""
        starts = tuple(self.starts[row] for row in rows.tolist())
        return Span(
            starts=starts,
            positions=self.positions[rows],
            limit=self.limit[rows],
            anchor=self.anchor[rows],
            keys=max(starts) + self.length,
            sees_all=self.sees_all,
            causal=self.causal,
        )

    def mask(self, window: int | None = None) -> Tensor | None:
        """bool [B, 1, T, S], True where the query sees the key, or None where no mask is needed (see `causal`).

        window: width of a sliding-attention layer. Masks are built once a span and kept.
        """
        if window is not None and window >= self.keys:
            window = None
        if window not in self._masks:
            self._masks[window] = self._build_mask(window)
        return self._masks[window]

    def _build_mask(self, window: int | None) -> Tensor | None:
        if window is None and (self.sees_all or self.causal):
            return None
        key_S = torch.arange(self.keys, device=self.positions.device)
        visible_BTS = key_S < self.limit[..., None]
        if window is not None:
            visible_BTS = visible_BTS & (key_S > self.anchor[..., None] - window)
        return visible_BTS[:, None]


def _positions(starts: Sequence[int], length: int, device: torch.device | str) -> Tensor:
    return torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)


def canvas_span(starts: Sequence[int], widths: Sequence[int], length: int, device: torch.device | str) -> Span:
    """A canvas of `length` tokens at each row's start: bidirectional within itself, after all of the context.

    widths: how many of the tokens exist in each row (fewer than `length` where the context ends); nobody sees the rest.
    """
    positions = _positions(starts, length, device)
    limit = (torch.tensor(starts, device=device) + torch.tensor(widths, device=device))[:, None]
    return Span(
        starts=tuple(starts),
        positions=positions,
        limit=limit.expand_as(positions),
        anchor=positions[:, :1].expand_as(positions),
        keys=max(starts) + length,
        sees_all=len(set(starts)) == 1 and min(widths) == length,
    )


def causal_span(starts: Sequence[int], length: int, device: torch.device | str) -> Span:
    """`length` clean tokens at each row's start, each seeing itself and what precedes it."""
    positions = _positions(starts, length, device)
    return Span(
        starts=tuple(starts),
        positions=positions,
        limit=positions + 1,
        anchor=positions,
        keys=max(starts) + length,
        causal=not any(starts),
    )


def block_causal_span(starts: Sequence[int], length: int, block_length: int, device: torch.device | str) -> Span:
    """`length` clean tokens at each row's start, each seeing up to the end of its block; blocks lie at multiples of
    `block_length`. Starts and length must be multiples of it as well."""
    positions = _positions(starts, length, device)
    return Span(
        starts=tuple(starts),
        positions=positions,
        limit=(positions.div(block_length, rounding_mode="floor") + 1) * block_length,
        anchor=positions,
        keys=max(starts) + length,
        sees_all=length == block_length and len(set(starts)) == 1,
    )


class KVCache:
    """Keys and values of every layer, preallocated: k[layer] and v[layer] are [B, capacity, H, D].

    layers: (key/value heads, head width) of each layer.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.batch, self.capacity = batch, capacity
        shapes = [(batch, capacity, heads, width) for heads, width in layers]
        # Zeros, not uninitialised memory: an unseen key has weight 0, but 0 * NaN would still be NaN.
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]

    def write(self, layer: int, k_BTHD: Tensor, v_BTHD: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of the span's tokens; returns views of all S that it reads, [B, S, H, D] each."""
        k, v = self.k[layer], self.v[layer]
        start = span.common_start
        if start is not None:
            k[:, start : span.keys].copy_(k_BTHD)
            v[:, start : span.keys].copy_(v_BTHD)
        else:
            rows = torch.arange(self.batch, device=k.device)[:, None]
            k[rows, span.positions] = k_BTHD
            v[rows, span.positions] = v_BTHD
        return k[:, : span.keys], v[:, : span.keys]

    def select(self, rows: Tensor, capacity: int) -> "KVCache":
        """A copy of the first `capacity` positions of some of the rows (int64 [L])."""
        part = copy(self)
        part.batch, part.capacity = len(rows), capacity
        part.k = [k[:, :capacity].index_select(0, rows) for k in self.k]
        part.v = [v[:, :capacity].index_select(0, rows) for v in self.v]
        return part

    def keep_rows(self, rows: Tensor) -> None:
        """Drops every row of the batch that is not in `rows` (int64, in order)."""
        kept = self.select(rows, self.capacity)
        self.batch, self.k, self.v = kept.batch, kept.k, kept.v

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))
