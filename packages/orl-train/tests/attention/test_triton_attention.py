"""Numerics of the Triton kernels, on CUDA or, started by test_triton_interpreter.py, under Triton's interpreter."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from orl_train.attention import AttentionBackendError, staircase_attention
from orl_train.attention.triton_attention import triton_attention, triton_plan

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs CUDA or TRITON_INTERPRET=1"
)


def attend(visibility, tile=32, narrow_tile=16):
    def run(q, k, v, scale):
        plan = triton_plan(type(visibility)(*(x.to(DEVICE) for x in attributes(visibility))), tile, narrow_tile)
        return triton_attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), plan, scale).cpu()

    return run


def attributes(visibility):
    return visibility.segment, visibility.position, visibility.state, visibility.limit


@pytest.mark.parametrize("name", ["packed", "staircase", "block causal", "one token", "batch", "unordered"])
def test_value_and_gradient_equal_float64(visibilities, assert_equals_float64, name):
    seen = visibilities[name]
    assert_equals_float64(attend(seen), seen, heads=2, key_heads=1, rows=1, dtype=torch.float32, tolerance=1e-5)


@pytest.mark.parametrize(("heads", "key_heads", "width"), [(1, 1, 32), (4, 2, 16), (3, 1, 64)])
def test_grouped_heads_and_other_widths(visibilities, assert_equals_float64, heads, key_heads, width):
    seen = visibilities["staircase"]
    shape = {"heads": heads, "key_heads": key_heads, "width": width, "rows": 1}
    assert_equals_float64(attend(seen), seen, **shape, dtype=torch.float32, tolerance=2e-5)


@pytest.mark.parametrize("padding", [0, 14, 15, 16])
def test_every_length_around_a_tile_works(pack_states, assert_equals_float64, padding):
    """16 tokens and padding."""
    seen = pack_states([(5, [5], 4), (2, [2], 5)], padding)
    assert_equals_float64(attend(seen, 16), seen, heads=1, key_heads=1, rows=1, dtype=torch.float32, tolerance=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, for the NaNs, in the interpreter
def test_tiles_of_another_response_are_never_read(pack_states):
    seen = pack_states([(16, [16], 16), (16, [16], 16)], 0)
    first = seen.segment == 0
    q, k, v = (torch.randn(1, 1, 64, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    for x in (q, k, v):
        x[:, :, ~first] = float("nan")
        x.requires_grad_()
    out = attend(seen, 16)(q, k, v, 0.25)
    out[:, :, first].sum().backward()
    assert out[:, :, first].isfinite().all()
    assert all(x.grad[:, :, first].isfinite().all() for x in (q, k, v))
    assert out[:, :, ~first].isnan().all()


def test_tensors_with_strided_rows_and_gradients_give_the_same(visibilities):
    seen = visibilities["staircase"]
    length = len(seen.segment)
    g = torch.Generator().manual_seed(0)
    wide = [torch.randn(1, 1, length, 32, generator=g, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, 1, 16, length, generator=g).transpose(2, 3)
    outs, grads = [], []
    for make in (lambda x: x[..., ::2], lambda x: x[..., ::2].contiguous()):
        out = attend(seen)(*(make(x) for x in wide), 0.25)
        outs.append(out)
        grads.append(torch.autograd.grad(out, wide, grad if not grads else grad.contiguous()))
    assert torch.equal(outs[0], outs[1])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_width_or_dtype_without_a_kernel_is_a_typed_error(visibilities):
    seen = visibilities["staircase"]
    length = len(seen.segment)
    for x in (torch.zeros(1, 1, length, 24), torch.zeros(1, 1, length, 16, dtype=torch.float64)):
        with pytest.raises(AttentionBackendError, match="choose the sparse, flex or reference backend"):
            staircase_attention(x, x, x, seen, backend="triton")
