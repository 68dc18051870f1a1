import pytest
import torch

from dlmrt.cache import KVCache, block_causal_span, canvas_span, causal_span


def visible(span, window=None):
    """The mask as a bool tensor, the mask-free cases included."""
    mask = span.mask(window)
    if mask is not None:
        return mask[:, 0].expand(len(span.starts), -1, -1)
    shape = (len(span.starts), span.length, span.keys)
    if span.causal:
        return torch.ones(shape, dtype=torch.bool).tril()
    return torch.ones(shape, dtype=torch.bool)


def test_causal_span_sees_itself_and_what_precedes_it():
    for starts in ([0], [5], [0, 3]):
        span = causal_span(starts, 4, "cpu")
        for row, start in enumerate(starts):
            for query in range(4):
                seen = visible(span)[row, query].nonzero().flatten().tolist()
                assert seen == list(range(start + query + 1))


def test_canvas_span_sees_the_context_and_all_of_the_canvas_that_exists():
    span = canvas_span([3, 6], [4, 2], 4, "cpu")
    assert span.keys == 10
    for query in range(4):
        assert visible(span)[0, query].nonzero().flatten().tolist() == list(range(7))
        assert visible(span)[1, query].nonzero().flatten().tolist() == list(range(8))


def test_whole_canvas_of_rows_with_one_start_needs_no_mask():
    assert canvas_span([3, 3], [4, 4], 4, "cpu").mask() is None
    assert canvas_span([3, 3], [4, 3], 4, "cpu").mask() is not None
    assert canvas_span([3, 4], [4, 4], 4, "cpu").mask() is not None


def test_block_causal_span_sees_to_the_end_of_its_block():
    span = block_causal_span([4], 8, 4, "cpu")
    seen = visible(span)[0].sum(-1).tolist()
    assert seen == [8] * 4 + [12] * 4


def test_sliding_window_counts_from_the_query_in_a_commit_and_from_the_start_of_a_canvas():
    commit = visible(causal_span([0], 6, "cpu"), window=3)[0]
    assert commit[5].nonzero().flatten().tolist() == [3, 4, 5]
    canvas = visible(canvas_span([6], [4], 4, "cpu"), window=3)[0]
    for query in range(4):
        assert canvas[query].nonzero().flatten().tolist() == [4, 5, 6, 7, 8, 9]
    assert canvas_span([6], [4], 4, "cpu").mask(10) is None


@pytest.mark.parametrize("starts", [[2, 2], [1, 3]])
def test_write_puts_keys_at_their_positions_and_returns_all_that_are_read(starts):
    cache = KVCache([(2, 3), (1, 4)], batch=2, capacity=10, dtype=torch.float32, device="cpu")
    span = canvas_span(starts, [4, 4], 4, "cpu")
    k, v = torch.randn(2, 4, 1, 4), torch.randn(2, 4, 1, 4)
    keys, values = cache.write(1, k, v, span)
    assert keys.shape == values.shape == (2, max(starts) + 4, 1, 4)
    for row, start in enumerate(starts):
        assert torch.equal(keys[row, start : start + 4], k[row])
        assert torch.equal(values[row, start : start + 4], v[row])
        assert not keys[row, :start].any()
    assert not cache.k[0].any()


def test_keep_rows_keeps_them_in_order():
    cache = KVCache([(1, 2)], batch=3, capacity=4, dtype=torch.float32, device="cpu")
    cache.k[0].copy_(torch.arange(3.0)[:, None, None, None].expand(3, 4, 1, 2))
    cache.keep_rows(torch.tensor([0, 2]))
    assert cache.batch == 2
    assert cache.k[0][:, 0, 0, 0].tolist() == [0.0, 2.0]


def test_nbytes_counts_keys_and_values_of_every_layer():
    cache = KVCache([(2, 3), (1, 4)], batch=2, capacity=10, dtype=torch.float32, device="cpu")
    assert cache.nbytes == 2 * 2 * 10 * (6 + 4) * 4
