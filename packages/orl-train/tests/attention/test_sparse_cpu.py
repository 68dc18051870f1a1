import pytest
import torch

from orl_core.visibility import Visibility
from orl_train.attention.sparse_cpu import sparse_attention, sparse_plan


def attend(visibility):
    def run(q, k, v, scale):
        return sparse_attention(q, k, v, sparse_plan(visibility, q.shape[0]), scale)

    return run


@pytest.mark.parametrize("name", ["packed", "staircase", "block causal", "one token", "batch", "unordered"])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (3, 1)])
def test_value_and_gradient_equal_the_dense_mask(visibilities, assert_equals_float64, name, heads, key_heads):
    assert_equals_float64(attend(visibilities[name]), visibilities[name], heads=heads, key_heads=key_heads)


def test_float32_is_within_rounding(visibilities, assert_equals_float64):
    seen = visibilities["packed"]
    assert_equals_float64(attend(seen), seen, dtype=torch.float32, tolerance=5e-6)


def test_gradients_pass_gradcheck(pack_states):
    plan = sparse_plan(pack_states([(3, [3, 1], 2)], 1), 1)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 8, 2, generator=g, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1))
    assert torch.autograd.gradcheck(lambda *x: sparse_attention(*x, plan, 0.5), (q, k, v))


def test_states_compute_visible_scores_only(pack_states):
    """Nothing but the upper triangle of a causal context is computed beyond what is visible."""
    seen = pack_states([(60, [60, 60, 28], 32), (90, [90, 58], 32)], 5)
    invisible = sum(n * (n - 1) // 2 for n in (60, 90))
    assert sparse_plan(seen, 1).scores == int(seen.dense_mask().sum()) + invisible


def test_equal_sets_of_different_responses_form_one_batch(pack_states):
    plan = sparse_plan(pack_states([(10, [10, 10], 4)] * 3, 0), 1)
    assert plan.batches == ((3, 10, 10, True), (6, 4, 14, False))


def test_tokens_that_see_nothing_of_another_response_do_not_depend_on_it(visibilities):
    seen: Visibility = visibilities["packed"]
    plan, g = sparse_plan(seen, 1), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, len(seen.segment), 4, generator=g) for _ in range(3))
    before = sparse_attention(q, k, v, plan, 0.5)
    first = seen.segment == 0
    for x in (q, k, v):
        x[:, :, first] += 1
    after = sparse_attention(q, k, v, plan, 0.5)
    assert torch.equal(before[:, :, ~first], after[:, :, ~first])
    assert not torch.equal(before[:, :, first], after[:, :, first])
