"""Tile map of block-diffusion visibility: which (query tile, key tile) pairs hold work, without a dense mask.

Each tile is summarised by ranges of its tokens' attributes. The map is conservative: EMPTY and FULL are certain,
PARTIAL means that the predicate decides inside the tile. It is exact for a key tile of one segment that is clean or of
one state, seen by a query tile of one segment and state.
Shape legend: B batch, T tokens, I query tiles, J key tiles.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from orl_core.errors import ShapeError, require_at_least
from orl_core.visibility import PADDING_SEGMENT, Visibility, is_visible

_LARGE = 2**62


class TileKind(IntEnum):
    EMPTY = 0
    PARTIAL = 1
    FULL = 2


@dataclass(frozen=True, slots=True)
class TileLists:
    """For each row of tiles, the tiles that hold work, full ones first; int32, flattened over (batch, row).

    start [B*R]     where the row's list starts in `index`
    middle [B*R]    where its partial tiles start
    end [B*R]       where its list ends
    index [n]       numbers of the tiles
    """

    start: Tensor
    middle: Tensor
    end: Tensor
    index: Tensor


@dataclass(frozen=True, slots=True)
class TileMap:
    """kind: int8 [B, I, J] of TileKind; query_tile, key_tile: tokens per tile; length: T."""

    kind: Tensor
    query_tile: int
    key_tile: int
    length: int

    def by_query(self) -> TileLists:
        """Key tiles of each query tile (forward and dQ)."""
        return _lists(self.kind)

    def by_key(self) -> TileLists:
        """Query tiles of each key tile (dK and dV)."""
        return _lists(self.kind.transpose(1, 2))

    @property
    def work(self) -> float:
        """Fraction of the tiles that are not empty."""
        return (self.kind != TileKind.EMPTY).float().mean().item()


def tile_map(visibility: Visibility, query_tile: int, key_tile: int) -> TileMap:
    """The tile map of attributes [T] or [B, T]. The last tile may be incomplete; it is never FULL."""
    require_at_least("query_tile", query_tile, 1)
    require_at_least("key_tile", key_tile, 1)
    if visibility.segment.dim() not in (1, 2):
        raise ShapeError(f"attributes have shape {tuple(visibility.segment.shape)}; they must be [T] or [B, T]")
    q, k = _Summary(visibility, query_tile), _Summary(visibility, key_tile)
    row, column = (slice(None), slice(None), None), (slice(None), None, slice(None))

    def overlap(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
        return (a[0][row] <= b[1][column]) & (b[0][column] <= a[1][row])

    sees_clean = overlap(q.segment, k.clean_segment) & (k.clean_position[0][column] < q.limit[1][row])
    sees_state = overlap(q.noisy_segment, k.noisy_segment) & overlap(q.state, k.state)
    sees_padding = q.padding[row] & k.padding[column] & overlap(q.index, k.index)

    one_segment = (q.segment[0][row] == k.segment[1][column]) & (q.segment[1][row] == k.segment[0][column])
    whole = (q.complete & ~q.padding)[row] & (k.complete & ~k.padding)[column] & one_segment
    all_clean = ~k.any_noisy[column] & (k.clean_position[1][column] < q.limit[0][row])
    one_state = (q.state[0][row] == k.state[1][column]) & (q.state[1][row] == k.state[0][column])
    all_state = ~k.any_clean[column] & ~q.any_clean[row] & one_state

    kind = (sees_clean | sees_state | sees_padding).to(torch.int8)
    kind = torch.where(whole & (all_clean | all_state), torch.full_like(kind, TileKind.FULL), kind)
    return TileMap(kind, query_tile, key_tile, visibility.segment.shape[-1])


def mask_mod(visibility: Visibility):
    """The same predicate as FlexAttention's `mask_mod(batch, head, query, key)`, for attributes [T] or [B, T]."""
    segment, position, state, limit = (getattr(visibility, name) for name in ("segment", "position", "state", "limit"))
    if segment.dim() == 1:
        segment, position, state, limit = (x[None] for x in (segment, position, state, limit))
    shared = segment.shape[0] == 1

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        b = batch * 0 if shared else batch
        seen = is_visible(
            segment[b, query], state[b, query], limit[b, query], segment[b, key], position[b, key], state[b, key]
        )
        return seen | ((segment[b, query] == PADDING_SEGMENT) & (query == key))

    return visible


class _Summary:
    """Ranges (low, high) [B, tiles] of the attributes; an empty range is (LARGE, -LARGE) and overlaps nothing."""

    def __init__(self, visibility: Visibility, tile: int) -> None:
        segment, position, state, limit = (
            _tiles(getattr(visibility, name), tile, fill)
            for name, fill in (("segment", PADDING_SEGMENT), ("position", 0), ("state", 0), ("limit", 0))
        )
        index = torch.arange(visibility.segment.shape[-1], device=segment.device).expand(visibility.segment.shape)
        index = _tiles(index, tile, -1)
        real = segment != PADDING_SEGMENT
        clean, noisy = real & (state == 0), real & (state != 0)
        self.padding = ((segment == PADDING_SEGMENT) & (index >= 0)).any(-1)
        self.complete = (index >= 0).all(-1)
        self.any_clean, self.any_noisy = clean.any(-1), noisy.any(-1)
        self.segment = _range(segment, real)
        self.clean_segment, self.noisy_segment = _range(segment, clean), _range(segment, noisy)
        self.clean_position = _range(position, clean)
        self.state = _range(state, noisy)
        self.limit = _range(limit, real)
        self.index = _range(index, index >= 0)


def _tiles(x: Tensor, tile: int, fill: int) -> Tensor:
    """[T] or [B, T] -> [B, tiles, tile], the last tile filled up."""
    x = x if x.dim() == 2 else x[None]
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % tile), value=fill).unflatten(-1, (-1, tile))


def _range(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    low = torch.where(counts, x, torch.full_like(x, _LARGE)).amin(-1)
    high = torch.where(counts, x, torch.full_like(x, -_LARGE)).amax(-1)
    return low, high


def _lists(kind: Tensor) -> TileLists:
    flat = kind.flatten(0, 1)
    full, partial = (flat == TileKind.FULL).sum(-1), (flat == TileKind.PARTIAL).sum(-1)
    end = (full + partial).cumsum(0)
    start = end - full - partial
    order = flat.argsort(dim=-1, descending=True, stable=True)  # full (2), partial (1), empty (0)
    held = torch.arange(flat.shape[-1], device=flat.device) < (full + partial)[:, None]
    return TileLists(start.int(), (start + full).int(), end.int(), order[held].int())
