import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orl_core.errors import ShapeError
from orl_core.tiles import TileKind, mask_mod, tile_map
from orl_core.visibility import PADDING_SEGMENT, Visibility, staircase


def stack(*parts: Visibility) -> Visibility:
    """One sequence of the parts, each with a segment of its own, states numbered through."""
    segment = torch.cat([torch.full_like(p.segment, i) for i, p in enumerate(parts)])
    states, last = [], 0
    for p in parts:
        states.append(torch.where(p.state > 0, p.state + last, 0))
        last = int(states[-1].max())
    rest = (torch.cat([getattr(p, name) for p in parts]) for name in ("position", "limit"))
    position, limit = rest
    return Visibility(segment, position, torch.cat(states), limit)


def pad(v: Visibility, extra: int) -> Visibility:
    def grow(x, value):
        return torch.cat([x, torch.full((extra,), value)])

    return Visibility(grow(v.segment, PADDING_SEGMENT), grow(v.position, 0), grow(v.state, 0), grow(v.limit, 0))


@st.composite
def packed(draw):
    parts = [
        staircase(length, draw(st.integers(0, length - 1)), draw(st.integers(1, 9)), block_causal=draw(st.booleans()))
        for length in draw(st.lists(st.integers(1, 24), min_size=1, max_size=4))
    ]
    return pad(stack(*parts), draw(st.integers(0, 9)))


@st.composite
def scrambled(draw):
    """Attributes in no order at all: the map must stay right, if less sharp."""
    n = draw(st.integers(1, 30))

    def column(low, high):
        return torch.tensor(draw(st.lists(st.integers(low, high), min_size=n, max_size=n)))

    return Visibility(column(-1, 2), column(0, 6), column(0, 2), column(0, 7))


def dense_tiles(v: Visibility, rows: int, columns: int):
    """(any visible, all visible) of each tile, tokens beyond the end counting as invisible."""
    mask = v.dense_mask()
    t = mask.shape[-1]
    mask = torch.nn.functional.pad(mask, (0, -t % columns, 0, -t % rows))
    tiles = mask.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2)
    return tiles.any(-1).any(-1), tiles.all(-1).all(-1)


TILE = st.integers(1, 10)


@given(v=st.one_of(packed(), scrambled()), rows=TILE, columns=TILE)
def test_empty_and_full_are_certain(v, rows, columns):
    kind = tile_map(v, rows, columns).kind[0]
    some, every = dense_tiles(v, rows, columns)
    assert not (some & (kind == TileKind.EMPTY)).any()
    assert not (~every & (kind == TileKind.FULL)).any()


@given(blocks=st.integers(1, 5), prompt_tiles=st.integers(1, 4), answer_tiles=st.integers(1, 4), tile=st.integers(2, 6))
def test_the_map_is_exact_where_tiles_are_whole_blocks(blocks, prompt_tiles, answer_tiles, tile):
    prompt = prompt_tiles * tile
    parts = [staircase(prompt + answer_tiles * tile, prompt, tile) for _ in range(blocks)]
    v = stack(*parts)
    kind = tile_map(v, tile, tile).kind[0]
    some, every = dense_tiles(v, tile, tile)
    assert torch.equal(kind != TileKind.EMPTY, some)
    assert torch.equal(kind == TileKind.FULL, every)


def test_work_follows_the_staircase_and_not_the_square():
    v = stack(*(staircase(96, 64, 32) for _ in range(16)))
    assert tile_map(v, 32, 32).work < 0.04


@given(v=packed(), rows=TILE, columns=TILE)
def test_lists_hold_the_full_and_then_the_partial_tiles_of_each_row(v, rows, columns):
    tiles = tile_map(v, rows, columns)
    for lists, kind in ((tiles.by_query(), tiles.kind[0]), (tiles.by_key(), tiles.kind[0].T)):
        for row in range(kind.shape[0]):
            start, middle, end = (int(x[row]) for x in (lists.start, lists.middle, lists.end))
            assert lists.index[start:middle].tolist() == (kind[row] == TileKind.FULL).nonzero().flatten().tolist()
            assert lists.index[middle:end].tolist() == (kind[row] == TileKind.PARTIAL).nonzero().flatten().tolist()


def test_a_batch_is_mapped_row_by_row():
    rows = [pad(staircase(20, 8, 4), 4), pad(staircase(12, 4, 8), 16)]
    batch = Visibility(*(torch.stack([getattr(r, a) for r in rows]) for a in ("segment", "position", "state", "limit")))
    kind = tile_map(batch, 4, 8).kind
    for i, row in enumerate(rows):
        assert torch.equal(kind[i], tile_map(row, 4, 8).kind[0])
    lists = tile_map(batch, 4, 8).by_query()
    assert len(lists.start) == 2 * kind.shape[1]
    assert int(lists.end[-1]) == len(lists.index) == int((kind != TileKind.EMPTY).sum())


@given(v=st.one_of(packed(), scrambled()))
def test_mask_mod_is_the_dense_mask(v):
    t = v.segment.shape[0]
    query, key = torch.meshgrid(torch.arange(t), torch.arange(t), indexing="ij")
    zero = torch.tensor(0)
    assert torch.equal(mask_mod(v)(zero, zero, query, key), v.dense_mask())


def test_mask_mod_reads_the_row_of_a_batch():
    rows = [staircase(8, 4, 2), staircase(8, 4, 4)]
    batch = Visibility(*(torch.stack([getattr(r, a) for r in rows]) for a in ("segment", "position", "state", "limit")))
    index = torch.arange(12)
    for b, row in enumerate(rows):
        mask = mask_mod(batch)(torch.tensor(b), torch.tensor(0), index[:, None], index[None, :])
        assert torch.equal(mask, row.dense_mask())


def test_attributes_of_another_rank_are_refused():
    v = staircase(8, 4, 2)
    cube = Visibility(*(getattr(v, a)[None, None] for a in ("segment", "position", "state", "limit")))
    with pytest.raises(ShapeError, match="must be"):
        tile_map(cube, 4, 4)
