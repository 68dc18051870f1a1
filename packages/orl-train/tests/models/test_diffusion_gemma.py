"""The trainable DiffusionGemma against transformers' own forward, on the checkpoint of `dlmrt/tests/golden`."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from orl_core.errors import ConfigError, ShapeError
from orl_core.protocols import Denoiser
from orl_core.residual import expected_embedding
from orl_core.visibility import Visibility
from orl_train.attention import attention_plan
from orl_train.models.diffusion_gemma import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

GOLDEN = Path(__file__).parents[3] / "dlmrt" / "tests" / "golden" / "diffusion_gemma_tiny"
CANVAS, CONTEXT = 16, 21  # the context is longer than the sliding window of 12


@pytest.fixture(scope="module")
def model() -> DiffusionGemmaForBlockDiffusion:
    return DiffusionGemmaForBlockDiffusion.from_pretrained(GOLDEN, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def published() -> transformers.DiffusionGemmaForBlockDiffusion:
    return transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(GOLDEN, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(contexts [2, 21], canvases [2, 16], logits of the step before [2, 16, V])."""
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 250, (2, length), generator=g) for length in (CONTEXT, CANVAS)]
    return *ids, torch.randn(2, CANVAS, 256, generator=g) * 4


def one_state(context: int) -> Visibility:
    """[context | canvas] of one sequence."""
    clean, canvas = torch.arange(context), torch.full((CANVAS,), context)
    position = torch.arange(context + CANVAS)
    return Visibility(
        segment=torch.zeros_like(position),
        position=position,
        state=(position >= context).long(),
        limit=torch.cat([clean + 1, canvas]),
    )


def signal(model, logits):
    """(z [.., T, d], receives [.., T]) of a whole [context | canvas]."""
    z = expected_embedding(logits.softmax(-1), model.embedding.detach())
    z = torch.cat([torch.full((len(z), CONTEXT, z.shape[-1]), 9.0), z], 1)  # a context takes none
    return z, (torch.arange(CONTEXT + CANVAS) >= CONTEXT).expand(z.shape[:2])


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("planned", [False, True])
def test_logits_equal_transformers(model, published, tokens, conditioned, planned):
    context, canvas, before = tokens
    visibility = one_state(CONTEXT)
    mask = attention_plan(visibility, batch=2, device=torch.device("cpu")) if planned else visibility
    z, receives = signal(model, before) if conditioned else (None, None)
    with torch.no_grad():
        expected = published(
            input_ids=context, decoder_input_ids=canvas, self_conditioning_logits=before if conditioned else None
        ).logits
        plain = published(input_ids=context, decoder_input_ids=canvas).logits
        ids = torch.cat([context, canvas], 1)
        found = model.denoise(ids, visibility.position.expand(2, -1), mask, z, receives)[:, CONTEXT:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert conditioned is not torch.allclose(expected, plain, atol=1e-2)


def test_a_position_that_takes_no_residual_has_none(model, tokens):
    context, canvas, before = tokens
    visibility, ids = one_state(CONTEXT), torch.cat([context, canvas], 1)
    z, receives = signal(model, before)
    position = visibility.position.expand(2, -1)
    with torch.no_grad():
        without = model.denoise(ids, position, visibility)
        nowhere = model.denoise(ids, position, visibility, z, torch.zeros_like(receives))
    torch.testing.assert_close(without, nowhere, atol=0, rtol=0)


def test_a_pack_gives_the_logits_of_each_of_its_states(model, published, tokens):
    """Two responses, of two states and of one, in one sequence: each state sees what transformers shows it."""
    context, canvas, before = tokens
    length = torch.tensor([CONTEXT, CONTEXT])
    parts = [  # (segment, tokens, state, start, logits of the step before)
        (0, context[0], 0, None),
        (0, canvas[0], 1, before[0]),
        (0, canvas[1], 2, None),
        (1, context[1], 0, None),
        (1, canvas[0], 3, before[1]),
    ]
    columns = {name: [] for name in ("ids", "segment", "position", "state", "limit", "z", "receives")}
    for segment, ids, state, logits in parts:
        position = torch.arange(len(ids)) + (CONTEXT if state else 0)
        z = torch.zeros(len(ids), 64) if logits is None else expected_embedding(logits.softmax(-1), model.embedding)
        values = (ids, torch.full_like(ids, segment), position, torch.full_like(ids, state))
        values += (length[:1].expand(len(ids)) if state else position + 1, z.detach())
        for name, value in zip(columns, (*values, torch.full_like(ids, logits is not None).bool()), strict=True):
            columns[name].append(value)
    column = {name: torch.cat(values)[None] for name, values in columns.items()}
    visibility = Visibility(*(column[name][0] for name in ("segment", "position", "state", "limit")))
    plan = attention_plan(visibility, batch=1, device=torch.device("cpu"))
    rows = (visibility.state > 0).nonzero().squeeze(-1)
    with torch.no_grad():
        found = model(column["ids"], column["position"], plan, column["z"], column["receives"], rows)
        expected = [
            published(input_ids=c[None], decoder_input_ids=x[None], self_conditioning_logits=b).logits[0]
            for c, x, b in (
                (context[0], canvas[0], before[:1]),
                (context[0], canvas[1], None),
                (context[1], canvas[0], before[1:]),
            )
        ]
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=0)


def test_gradients_reach_the_shared_weights_and_the_residual_pathway(tokens):
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(GOLDEN, dtype=torch.float32)
    context, canvas, before = tokens
    visibility, (z, receives) = one_state(CONTEXT), signal(model, before)
    z.requires_grad_()
    ids, position = torch.cat([context, canvas], 1), visibility.position.expand(2, -1)
    model.denoise(ids, position, visibility, z, receives)[:, CONTEXT:].square().mean().backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None and "vision" not in n]
    assert silent == []
    assert z.grad is None
    decoder = model.model.decoder
    assert decoder.self_conditioning.down_proj.weight.grad.abs().sum() > 0
    assert model.model.encoder.language_model.layers[0].mlp.up_proj.weight is decoder.layers[0].mlp.up_proj.weight


def test_the_engine_computes_the_same_from_the_shared_tensors(model, tokens):
    pytest.importorskip("dlmrt", reason="the engine is an optional dependency (orl-train[engine])")
    from dlmrt.cache import canvas_span, causal_span
    from dlmrt.engine import Engine

    config = model.config.to_dict() | {"architectures": ["DiffusionGemmaForBlockDiffusion"]}
    engine = Engine.from_state(config, model.state_dict()).model
    context, canvas, before = tokens
    z, receives = signal(model, before)
    cache = engine.new_cache(2, 64)
    visibility = one_state(CONTEXT)
    with torch.no_grad():
        engine.encode(context, causal_span([0, 0], CONTEXT, "cpu"), cache)
        span = canvas_span([CONTEXT] * 2, [CANVAS] * 2, CANVAS, "cpu")
        theirs = engine.logits(engine.denoise(canvas, z[:, CONTEXT:], receives[:, CONTEXT:], span, cache))
        ids, position = torch.cat([context, canvas], 1), visibility.position.expand(2, -1)
        ours = model.denoise(ids, position, visibility, z, receives)[:, CONTEXT:]
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)


def test_saved_checkpoint_has_the_published_layout(model, tmp_path):
    model.save_pretrained(tmp_path)
    saved, original = load_file(tmp_path / "model.safetensors"), load_file(GOLDEN / "model.safetensors")
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in original)
    again = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path)
    assert again.config.architectures == ["DiffusionGemmaForBlockDiffusion"]


def test_it_is_a_denoiser_whose_config_answers_for_its_text_model(model):
    assert isinstance(model, Denoiser)
    config = model.config
    assert (config.vocab_size, config.hidden_size, config.canvas_length) == (256, 64, 16)
    assert (config.state_family, config.mask_token_id, config.eos_token_id) == ("uniform", None, 1)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = config.nothing_such


def test_wrong_input_gets_an_error_that_says_what_is_right(model):
    config = DiffusionGemmaConfig.from_pretrained(GOLDEN)
    config.text_config.use_bidirectional_attention = "all"
    with pytest.raises(ConfigError, match="token-causal"):
        DiffusionGemmaForBlockDiffusion(config)
    one, other = one_state(4), one_state(8)
    rows = [
        torch.stack([getattr(one, n)[:20], getattr(other, n)[:20]]) for n in ("segment", "position", "state", "limit")
    ]
    ids = torch.zeros(2, 20, dtype=torch.int64)
    with pytest.raises(ShapeError, match="lie alike"):
        model.denoise(ids, rows[1], Visibility(*rows))
