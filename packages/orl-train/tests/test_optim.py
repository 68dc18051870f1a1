"""Which optimizer owns which weight, and the learning-rate schedule."""

import pytest
import torch

from orl_core.errors import ConfigError
from orl_train.optim import OptimizerConfig, build_optimizers, schedule_factor
from orl_train.pretrain import build_model


def test_matrices_of_the_layers_go_to_muon_and_everything_is_owned_once(tiny_run, tokenizer):
    model = build_model(tiny_run(), tokenizer)
    muon, adam = build_optimizers(model, OptimizerConfig(muon_lr=0.1, adam_lr=0.01, residual_factor=0.5))
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def owned(optimizer):
        return {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}

    matrices, others = owned(muon), owned(adam)
    assert matrices.keys() | others.keys() == set(names.values())
    assert not matrices.keys() & others.keys()
    assert matrices["model.layers.0.mlp.up_proj.weight"] == 0.1
    assert matrices["residual_adapter.down_proj.weight"] == 0.05
    assert others["model.embed_tokens.weight"] == 0.01
    assert others["model.norm.weight"] == 0.01
    assert others["residual_adapter.alpha"] == 0.005


def test_the_schedule_warms_up_stays_and_decays_to_almost_nothing():
    config = OptimizerConfig(warmup=4, decay_share=0.5)
    factors = [schedule_factor(step, 20, config) for step in range(20)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4:11] == [1.0] * 7
    torch.testing.assert_close(factors[11:], [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    assert schedule_factor(20, 20, config) == 0.0


def test_a_share_outside_its_range_is_named():
    with pytest.raises(ConfigError, match=r"decay_share is 1.5; it must lie in \[0, 1\]"):
        OptimizerConfig(decay_share=1.5)
