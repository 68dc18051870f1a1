"""Packed sequences and a comparison with float64 over the dense mask."""

import pytest
import torch

from orl_core.visibility import PADDING_SEGMENT, Visibility, staircase
from orl_train.attention.reference import dense_attention

ATTRIBUTES = ("segment", "position", "state", "limit")


def _pack(parts, padding):
    """Responses (context, block starts of the states, canvas) one after the other, then padding."""
    columns = {name: [] for name in ATTRIBUTES}
    state = 0
    for segment, (context, starts, canvas) in enumerate(parts):
        pieces = [(torch.arange(context), 0, torch.arange(context) + 1)]
        for start in starts:
            state += 1
            pieces.append((start + torch.arange(canvas), state, torch.full((canvas,), start)))
        for position, number, limit in pieces:
            columns["segment"].append(torch.full_like(position, segment))
            columns["position"].append(position)
            columns["state"].append(torch.full_like(position, number))
            columns["limit"].append(limit)
    for name in ATTRIBUTES:
        columns[name].append(torch.full((padding,), PADDING_SEGMENT if name == "segment" else 0))
    return Visibility(*(torch.cat(columns[name]) for name in ATTRIBUTES))


@pytest.fixture(scope="session")
def pack_states():
    return _pack


def _shuffled(visibility, seed):
    order = torch.randperm(len(visibility.segment), generator=torch.Generator().manual_seed(seed))
    return Visibility(*(getattr(visibility, name)[order] for name in ATTRIBUTES))


@pytest.fixture(scope="session")
def visibilities():
    """Name -> attributes: odd lengths, several responses, padding, both kinds of context, a batch, no order at all."""
    packed = _pack([(13, [13, 13, 6, 0], 7), (5, [5], 7), (13, [13], 7), (1, [], 7)], 3)
    batch = [_pack([(11, [4, 11], 9)], 0), _pack([(6, [6], 5), (3, [], 5)], 15)]
    return {
        "packed": packed,
        "staircase": staircase(23, 9, 5),
        "block causal": staircase(22, 5, 8, block_causal=True),
        "one token": staircase(1, 0, 1),
        "batch": Visibility(*(torch.stack([getattr(v, name) for v in batch]) for name in ATTRIBUTES)),
        "unordered": _shuffled(packed, 0),
    }


@pytest.fixture(scope="session")
def assert_equals_float64():
    """check(attend, visibility, ..): value and gradients of attend(q, k, v) against the dense mask in float64."""

    def check(
        attend,
        visibility,
        *,
        heads=4,
        key_heads=2,
        width=16,
        dtype=torch.float64,
        tolerance=1e-12,
        scale=0.3,
        rows=2,
        gradients=True,
    ):
        batch = visibility.segment.shape[0] if visibility.segment.dim() == 2 else rows
        length = visibility.segment.shape[-1]
        g = torch.Generator().manual_seed(0)

        def random(count):  # laid out [B, T, H, D], as projections give it
            x = torch.randn(batch, length, count, width, generator=g, dtype=torch.float64).to(dtype)
            return x.transpose(1, 2)

        inputs, grad = [random(heads), random(key_heads), random(key_heads)], random(heads)
        exact = [x.detach().double().requires_grad_() for x in inputs]
        inputs = [x.requires_grad_(gradients) for x in inputs]
        pairs = [(attend(*inputs, scale), dense_attention(*exact, visibility.dense_mask(), scale))]
        assert pairs[0][0].dtype == dtype
        if gradients:
            pairs[0][0].backward(grad)
            pairs[0][1].backward(grad.double())
            pairs += [(x.grad, y.grad) for x, y in zip(inputs, exact, strict=True)]
        for actual, expected in pairs:
            torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)

    return check
