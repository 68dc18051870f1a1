"""Residual context: expected embeddings, their top-k form, the adapter and who receives it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orl_core.errors import ConfigError, ShapeError
from orl_core.residual import (
    ResidualAdapter,
    add_residual,
    expected_embedding,
    expected_embedding_top_k,
    residual_receivers,
)


def random_case(seed: int, vocab: int, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(2, 3, vocab, generator=generator, dtype=dtype).mul(3).softmax(-1)
    return p, torch.randn(vocab, 5, generator=generator, dtype=dtype)


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_z_is_the_sum_of_p_times_embedding(seed, vocab):
    p, embedding = random_case(seed, vocab)
    loop = torch.zeros(2, 3, 5, dtype=torch.float64)
    for b in range(2):
        for c in range(3):
            for v in range(vocab):
                loop[b, c] += p[b, c, v] * embedding[v]
    torch.testing.assert_close(expected_embedding(p, embedding), loop, rtol=0, atol=1e-12)
    torch.testing.assert_close(expected_embedding(p.float(), embedding.float()), loop.float(), rtol=0, atol=1e-5)


def test_z_of_a_certain_token_is_its_embedding_and_has_the_embedding_dtype():
    embedding = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    z = expected_embedding(torch.eye(4)[None], embedding)
    assert torch.equal(z[0], embedding)
    assert z.dtype == torch.bfloat16


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 14))
def test_top_k_is_within_its_error_bound(seed, vocab, k):
    p, embedding = random_case(seed, vocab)
    z, missed = expected_embedding_top_k(p, embedding, k)
    kept = p.sort(-1, descending=True).values[..., :k].sum(-1)
    torch.testing.assert_close(missed, 1 - kept, rtol=0, atol=1e-12)
    error = (z - expected_embedding(p, embedding)).norm(dim=-1)
    assert (error <= missed * embedding.norm(dim=-1).max() + 1e-12).all()


def test_top_k_of_the_whole_vocabulary_is_exact():
    p, embedding = random_case(0, 7)
    z, missed = expected_embedding_top_k(p, embedding, 7)
    torch.testing.assert_close(z, expected_embedding(p, embedding))
    assert missed.max() < 1e-12


def test_another_vocabulary_is_refused():
    with pytest.raises(ShapeError, match="7 tokens but the embedding has 8 rows"):
        expected_embedding(torch.full((1, 1, 7), 1 / 7), torch.zeros(8, 2))


def test_an_untrained_adapter_contributes_exactly_zero():
    z = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)) * 100
    embedding = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    residual = ResidualAdapter(8, 16)(z)
    assert (residual == 0).all()
    assert torch.equal(add_residual(embedding, residual, torch.ones(2, 3, dtype=torch.bool)), embedding)


def trained_adapter(dtype: torch.dtype) -> ResidualAdapter:
    adapter = ResidualAdapter(4, 6, eps=1e-5, alpha=0.5).to(dtype)
    generator = torch.Generator().manual_seed(2)
    for parameter in (
        adapter.norm.weight,
        *(m.weight for m in (adapter.gate_proj, adapter.up_proj, adapter.down_proj)),
    ):
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return adapter


def test_the_adapter_is_the_documented_formula():
    adapter = trained_adapter(torch.float64)
    z = torch.randn(5, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    h = z / (z.square().mean(-1, keepdim=True) + 1e-5).sqrt() * adapter.norm.weight
    gate, up = h @ adapter.gate_proj.weight.T, h @ adapter.up_proj.weight.T
    expected = 0.5 * ((gate * gate.sigmoid() * up) @ adapter.down_proj.weight.T)
    torch.testing.assert_close(adapter(z), expected, rtol=0, atol=1e-12)


def test_no_gradient_reaches_z_but_every_weight_gets_one():
    adapter = trained_adapter(torch.float32)
    z = torch.randn(3, 4, generator=torch.Generator().manual_seed(4), requires_grad=True)
    adapter(z).square().sum().backward()
    assert z.grad is None
    for name, parameter in adapter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_the_zero_adapter_can_start_to_learn():
    adapter = ResidualAdapter(4, 6)
    (adapter(torch.randn(3, 4, generator=torch.Generator().manual_seed(5))) - 1).square().sum().backward()
    assert adapter.down_proj.weight.grad.abs().max() > 0


def test_checkpoint_names_are_the_documented_ones():
    assert set(ResidualAdapter(4, 6).state_dict()) == {
        "norm.weight",
        "gate_proj.weight",
        "up_proj.weight",
        "down_proj.weight",
        "alpha",
    }


def test_only_receivers_are_changed():
    generator = torch.Generator().manual_seed(6)
    embedding = torch.randn(2, 3, 4, generator=generator).bfloat16()
    residual = torch.randn(2, 3, 4, generator=generator)
    residual[0, 0] = torch.nan  # what a position without context might hold
    receives = torch.tensor([[False, True, False], [True, True, False]])
    out = add_residual(embedding, residual, receives)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out[~receives], embedding[~receives])
    assert torch.equal(out[receives], (embedding + residual.bfloat16())[receives])


def test_receivers_of_both_families():
    unresolved = torch.tensor([[True, False, True], [False, True, False]])
    has_context = torch.tensor([True, False])
    nothing = [False] * 3
    assert residual_receivers("masked", unresolved, has_context).tolist() == [[True, False, True], nothing]
    assert residual_receivers("uniform", unresolved, has_context).tolist() == [[True] * 3, nothing]
    with pytest.raises(ConfigError, match="'uniform' or 'masked'"):
        residual_receivers("absorbing", unresolved, has_context)
