"""LoRA: what it trains, that it starts as the model itself, and that merging gives the same function."""

import copy
import sys

import pytest
import torch

from orl_core.decoders import Threshold
from orl_core.errors import ConfigError
from orl_train.engine_rollout import make_rollout, refresh_rollout
from orl_train.lora import LoraSettings, StartModel, add_lora, has_lora, merged_state
from orl_train.models.qwen_dlm import causal_mask
from orl_train.optim import OptimizerConfig, build_optimizers


@pytest.fixture
def models(small_workload):
    """(model as it was, the same with LoRA)."""
    pytest.importorskip("peft")
    plain = small_workload(1).model
    adapted = copy.deepcopy(plain)
    add_lora(adapted, LoraSettings(rank=3, alpha=6.0))
    return plain, adapted


def inputs():
    g = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(40, (1, 9), generator=g),
        "position_ids": torch.arange(9)[None],
        "attention_mask": causal_mask(9),
        "z": torch.randn(1, 9, 16, generator=g),
        "receives": torch.arange(9)[None] > 3,
    }


def train(model):
    """Two updates by an arbitrary loss: LoRA's second factor has no gradient while the first is zero."""
    optimizers = build_optimizers(model, OptimizerConfig())
    for _ in range(2):
        model(**inputs()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_it_starts_as_the_model_itself(models):
    plain, adapted = models
    assert not has_lora(plain)
    assert has_lora(adapted)
    torch.testing.assert_close(adapted(**inputs()), plain(**inputs()), atol=0, rtol=0)


def test_only_the_updates_and_the_residual_adapter_are_trained(models):
    _, adapted = models
    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    train(adapted)
    changed = {name for name, p in adapted.named_parameters() if not torch.equal(p, before[name])}
    expected = {name for name in before if "lora_" in name or name.startswith("residual_adapter.")}
    assert changed == expected
    assert len([name for name in expected if "lora_" in name]) == 2 * 7 * 2  # layers, projections, factors


def test_merged_state_is_the_same_function_under_the_plain_names(models):
    plain, adapted = models
    train(adapted)
    state = merged_state(adapted)
    assert state.keys() == plain.state_dict().keys()
    before = plain(**inputs())
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(**inputs()), adapted(**inputs()), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(plain(**inputs()), before, atol=1e-3)
    assert state["residual_adapter.alpha"].data_ptr() == adapted.residual_adapter.alpha.data_ptr()


def test_the_start_model_stays_the_reference(models):
    plain, adapted = models
    reference = StartModel(adapted)
    train(adapted)
    torch.testing.assert_close(reference(**inputs()), plain(**inputs()), atol=0, rtol=0)
    assert not torch.allclose(adapted(**inputs()), plain(**inputs()), atol=1e-3)
    trainable = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert any("lora_" in name for name in trainable)
    assert "residual_adapter.alpha" in trainable


def test_the_engine_gets_the_updates_when_it_is_refreshed(models):
    pytest.importorskip("dlmrt")
    _, adapted = models
    stops = frozenset([2])
    engine, reference = (make_rollout(adapted, stops, name) for name in ("dlmrt", "reference"))
    train(adapted)
    refresh_rollout(engine, adapted)
    refresh_rollout(reference, adapted)
    answers = [
        rollout.rollout([torch.arange(5, 16)], Threshold(1, 4, 0.9), max_new_tokens=12, seeds=[0])[0]
        for rollout in (engine, reference)
    ]
    assert answers[0].response_ids.tolist() == answers[1].response_ids.tolist()
    torch.testing.assert_close(answers[0].blocks[0].z, answers[1].blocks[0].z, atol=1e-5, rtol=0)


def test_without_peft_it_says_what_to_install(monkeypatch, small_workload):
    monkeypatch.setitem(sys.modules, "peft", None)
    model = small_workload(1).model
    with pytest.raises(ConfigError, match=r"install orl-train\[lora\]"):
        add_lora(model, LoraSettings())


def test_wrong_settings_are_refused(models):
    with pytest.raises(ConfigError, match=r"lora\.rank is 0"):
        LoraSettings(rank=0)
    with pytest.raises(ConfigError, match=r"lora\.alpha is 0"):
        LoraSettings(alpha=0.0)
    with pytest.raises(ConfigError, match="Linear has no linear layers"):
        add_lora(torch.nn.Linear(2, 2), LoraSettings())
