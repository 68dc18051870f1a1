"""The built-in rollout and dlmrt's engine give the same trajectories on shared weights."""

import pytest
import torch

from orl_core.capture import CaptureMode
from orl_core.decoders import Decoder, DraftEdit, EntropyBound, Threshold
from orl_core.errors import CaptureMemoryError, ConfigError
from orl_core.trajectory import Trajectory
from orl_train.engine_rollout import make_rollout
from orl_train.models.qwen_dlm import QwenDLMConfig, QwenDLMForBlockDiffusion
from orl_train.rollout import ReferenceRollout

VOCAB, CANVAS, EOS, MASK = 61, 6, 1, 2


def tiny_model(family: str, seed: int = 0) -> QwenDLMForBlockDiffusion:
    torch.manual_seed(seed)
    model = QwenDLMForBlockDiffusion(
        QwenDLMConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            canvas_length=CANVAS,
            state_family=family,
            mask_token_id=MASK if family == "masked" else None,
            residual_intermediate_size=16,
            tie_word_embeddings=True,
            eos_token_id=EOS,
            attn_implementation="eager",
        )
    )
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


DECODERS = [
    EntropyBound(VOCAB, entropy_bound=3.0, max_steps=7),
    EntropyBound(VOCAB, entropy_bound=4.0, max_steps=7, t_min=0.5, t_max=0.9, greedy=False),
    Threshold(MASK, CANVAS, threshold=0.1),
    Threshold(MASK, CANVAS, threshold=0.1, sampling_temperature=0.7),
    DraftEdit(MASK, CANVAS, threshold=0.1, edit_threshold=0.1, max_post_steps=3),
]


def rolled(
    model: QwenDLMForBlockDiffusion,
    decoder: Decoder,
    engine: str,
    residual: bool = True,
    capture: CaptureMode = "async",
) -> list[Trajectory]:
    prompts = [torch.arange(3, 3 + n) for n in (5, 1, 9, 6)]
    rollout = make_rollout(model, frozenset([EOS]), engine, capture=capture)
    return rollout.rollout(prompts, decoder, max_new_tokens=15, seeds=[3, -4, 5, 2**40], residual=residual)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("decoder", DECODERS, ids=lambda d: f"{type(d).__name__}-{'greedy' if d.greedy else 'sampled'}")
def test_engine_and_reference_give_the_same_trajectories(decoder: Decoder, residual: bool):
    pytest.importorskip("dlmrt")
    model = tiny_model(decoder.family)
    for ours, engine in zip(
        rolled(model, decoder, "reference", residual), rolled(model, decoder, "dlmrt", residual), strict=True
    ):
        assert ours.response_ids.tolist() == engine.response_ids.tolist()
        assert ours.finish_reason == engine.finish_reason
        assert [b.steps for b in ours.blocks] == [b.steps for b in engine.blocks]
        for a, b in zip(ours.blocks, engine.blocks, strict=True):
            assert (a.start, a.block) == (b.start, b.block)
            assert torch.equal(a.canvas, b.canvas)
            assert torch.equal(a.unresolved, b.unresolved)
            assert torch.equal(a.tokens, b.tokens)
            torch.testing.assert_close(a.entropy, b.entropy, atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(a.top_prob, b.top_prob, atol=1e-4, rtol=0)  # each step amplifies rounding
            assert (a.z[0] == 0).all()
            if residual:
                torch.testing.assert_close(a.z, b.z, atol=1e-5, rtol=0)


@pytest.mark.parametrize("engine", ["reference", "dlmrt"])
@pytest.mark.parametrize("decoder", [DECODERS[1], DECODERS[4]], ids=lambda d: type(d).__name__)
def test_captures_on_and_off_the_generation_path_are_identical(decoder: Decoder, engine: str):
    if engine == "dlmrt":
        pytest.importorskip("dlmrt")
    model = tiny_model(decoder.family)
    for a, b in zip(rolled(model, decoder, engine), rolled(model, decoder, engine, capture="sync"), strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()
        assert len(a.blocks) == len(b.blocks) > 0
        for ours, theirs in zip(a.blocks, b.blocks, strict=True):
            for field in ("canvas", "z", "unresolved", "entropy", "top_prob", "tokens"):
                assert torch.equal(getattr(ours, field), getattr(theirs, field)), field


def test_pages_beyond_the_limit_are_refused_before_any_forward():
    model = tiny_model("masked")
    rollout = ReferenceRollout(model, frozenset([EOS]), capture_limit_mib=0)
    model.hidden = None  # what would fail if anything ran
    with pytest.raises(CaptureMemoryError, match="1 rollouts of up to 6 steps"):
        rollout.rollout([torch.arange(3, 8)], DECODERS[2], max_new_tokens=6, seeds=[0])


def test_engine_sees_updates_of_the_weights_in_place():
    pytest.importorskip("dlmrt")
    model = tiny_model("masked")
    decoder = DECODERS[2]
    rollout = make_rollout(model, frozenset([EOS]), "dlmrt")
    prompts = [torch.arange(3, 8)]
    before = rollout.rollout(prompts, decoder, max_new_tokens=12, seeds=[0])[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    after = rollout.rollout(prompts, decoder, max_new_tokens=12, seeds=[0])[0]
    fresh = ReferenceRollout(model, frozenset([EOS])).rollout(prompts, decoder, max_new_tokens=12, seeds=[0])[0]
    assert after.response_ids.tolist() == fresh.response_ids.tolist()
    assert after.response_ids.tolist() != before.response_ids.tolist()


def test_row_of_a_batch_equals_the_single_run():
    model = tiny_model("uniform")
    decoder = DECODERS[1]
    prompts = [torch.arange(3, 3 + n) for n in (5, 1, 9, 6)]
    rollout = ReferenceRollout(model, frozenset([EOS]))
    batch = rollout.rollout(prompts, decoder, max_new_tokens=15, seeds=[3, -4, 5, 2**40])
    single = rollout.rollout(prompts[2:3], decoder, max_new_tokens=15, seeds=[5])[0]
    assert batch[2].response_ids.tolist() == single.response_ids.tolist()


def test_wrong_requests_are_refused():
    model = tiny_model("masked")
    rollout = ReferenceRollout(model, frozenset([EOS]))
    prompt = [torch.arange(3, 8)]
    with pytest.raises(ConfigError, match="family"):
        rollout.rollout(prompt, DECODERS[0], max_new_tokens=8, seeds=[0])
    with pytest.raises(ConfigError, match="context of 64"):
        rollout.rollout(prompt, DECODERS[2], max_new_tokens=60, seeds=[0])
    with pytest.raises(ConfigError, match="seeds"):
        rollout.rollout(prompt, DECODERS[2], max_new_tokens=8, seeds=[0, 1])
    with pytest.raises(ConfigError, match="rollout engine"):
        make_rollout(model, frozenset([EOS]), "other")
