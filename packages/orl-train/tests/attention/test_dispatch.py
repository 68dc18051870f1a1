import sys

import pytest
import torch

from orl_core.errors import OrlError, ShapeError
from orl_train.attention import AttentionBackendError, attention_plan, staircase_attention

CPU = torch.device("cpu")


@pytest.fixture
def tensors(visibilities):
    length = len(visibilities["packed"].segment)
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, length, 8, generator=g) for h in (4, 2, 2)]


def test_auto_is_sparse_on_cpu_and_equals_the_reference(visibilities, tensors):
    seen = visibilities["packed"]
    plan = attention_plan(seen, batch=2, device=CPU)
    assert plan.backend == "sparse"
    reference = staircase_attention(*tensors, seen, backend="reference")
    torch.testing.assert_close(staircase_attention(*tensors, plan), reference)
    torch.testing.assert_close(staircase_attention(*tensors, seen), reference)


def test_the_default_scale_is_the_inverse_root_of_the_head_width(visibilities, tensors):
    seen = visibilities["packed"]
    assert torch.equal(staircase_attention(*tensors, seen), staircase_attention(*tensors, seen, scale=8**-0.5))


def test_a_backend_without_its_package_is_a_typed_error(visibilities, tensors, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("triton_attention", "triton_kernel"):
        monkeypatch.delitem(sys.modules, f"orl_train.attention.{name}", raising=False)
    with pytest.raises(AttentionBackendError, match="triton attention backend cannot be imported") as caught:
        staircase_attention(*tensors, visibilities["packed"], backend="triton")
    assert isinstance(caught.value, OrlError)


def test_an_unknown_backend_is_a_typed_error_with_the_choices(visibilities):
    with pytest.raises(AttentionBackendError, match="choose auto, reference, sparse, triton, flex"):
        attention_plan(visibilities["packed"], batch=1, device=CPU, backend="fused")  # pyright: ignore[reportArgumentType]


def test_shapes_that_do_not_match_are_refused(visibilities, tensors):
    q, k, v = tensors
    seen = visibilities["packed"]
    for wrong in [
        (q[:, :, 1:], k, v),
        (q[:, :3], k, v),
        (q, k, v[:, :1]),
        (q, k[..., :4], v[..., :4]),
        (q[0], k[0], v[0]),
    ]:
        with pytest.raises(ShapeError, match="needs q"):
            staircase_attention(*wrong, attention_plan(seen, batch=2, device=CPU))
    with pytest.raises(ShapeError, match="dtypes"):
        staircase_attention(q.double(), k, v, seen)
    with pytest.raises(ShapeError, match="a batch of 3"):
        attention_plan(visibilities["batch"], batch=3, device=CPU)
