import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from orl_core.tiles import mask_mod
from orl_train.attention import AttentionBackendError, staircase_attention
from orl_train.attention.flex import flex_block_mask, flex_masked_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.parametrize("name", ["packed", "staircase", "block causal", "batch", "unordered"])
def test_values_equal_the_dense_mask(visibilities, assert_equals_float64, name):
    seen = visibilities[name]

    def run(q, k, v, scale):
        return flex_masked_attention(q, k, v, flex_block_mask(seen, tile=16), scale)

    assert_equals_float64(run, seen, dtype=torch.float32, tolerance=5e-6, gradients=False)


def test_blocks_are_those_of_create_block_mask_where_tiles_are_whole_states(pack_states):
    seen = pack_states([(32, [32, 16, 32], 16), (16, [16], 16)], 0)
    length = len(seen.segment)
    ours = flex_block_mask(seen, tile=16)
    theirs = create_block_mask(mask_mod(seen), 1, 1, length, length, device="cpu", BLOCK_SIZE=16)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    assert ours.sparsity() == theirs.sparsity() > 60


def test_a_gradient_on_cpu_is_a_typed_error(visibilities):
    x = torch.zeros(1, 1, len(visibilities["staircase"].segment), 16, requires_grad=True)
    with pytest.raises(AttentionBackendError, match="no backward pass on cpu; choose the sparse"):
        staircase_attention(x, x, x, visibilities["staircase"], backend="flex")
