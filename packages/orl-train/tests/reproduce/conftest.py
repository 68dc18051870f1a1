"""A reproduction of seconds: tiny random start models, two updates, four problems, two thresholds."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from orl_train.pretrain import build_model
from orl_train.reproduce import ReproduceConfig, load_study
from orl_train.reproduce.sweep import Measurement
from orl_train.saving import save_model

RECIPE = """
start = "replaced"
updates = 2
save_every = 1
evaluate_every = 0
max_barren = 2
[rollout]
prompts = 4
max_new_tokens = 24
max_steps = 4
engine = "reference"
low = 0.3
high = 0.6
temperature = 0.7
"""
STUDY = """
headline_seeds = [3, 5]
ablation_seed = 3
dev_problems = 4
test_problems = 5
margin = 10
[uniform]
start = "{uniform}"
recipe = "recipe.toml"
grid = [0.1, 4]
[masked]
start = "{masked}"
recipe = "recipe.toml"
grid = [0.2, 0.9]
"""


def odd(prompt: str, response: str, reference: object) -> bool:
    """A verdict that a random model meets about every second time."""
    return len(response) % 2 == 1


@pytest.fixture(scope="session")
def study_file(tmp_path_factory, tokenizer, tiny_run) -> Path:
    """Start models of both families, the recipe and the file that names them."""
    folder = tmp_path_factory.mktemp("study")
    for family in ("uniform", "masked"):
        torch.manual_seed(0)
        shape = {"model_canvas_length": 8, "model_layers": 1, "model_max_position_embeddings": 160}
        model = build_model(tiny_run(model_state_family=family, **shape), tokenizer)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    torch.nn.init.normal_(parameter, std=0.15)
            model.model.embed_tokens.weight[model.config.eos_token_id] *= 8  # so that answers end
        save_model(model, tokenizer, folder / family, torch.float32)
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "study.toml").write_text(STUDY.format(uniform=folder / "uniform", masked=folder / "masked"))
    return folder / "study.toml"


@pytest.fixture(scope="session")
def study(study_file) -> ReproduceConfig:
    return load_study(study_file)


@pytest.fixture
def point() -> Callable[..., Measurement]:
    """A measurement; keywords override it, and right, tokens and forwards decide what follows from them."""

    def build(**values) -> Measurement:
        lists = {"right": [1, 1, 0, 1], "tokens": [30, 40, 50, 60], "forwards": [10, 10, 10, 10]}
        lists |= {name: values.pop(name) for name in list(values) if name in lists}
        n, tokens, forwards = len(lists["right"]), sum(lists["tokens"]), sum(lists["forwards"])
        settings = {
            "model": "model",
            "split": "test",
            "threshold": 0.5,
            "confidence_threshold": None,
            "stability_threshold": None,
            "residual": True,
            "temperature": 0.0,
            "n": n,
            "accuracy": sum(lists["right"]) / n,
            "final_accuracy": sum(lists["right"]) / n,
            "tpf": tokens / forwards,
            "tpf_commit": tokens / (forwards + n),
            "diversity": 1.0,
            "seconds": 2.0,
        }
        return Measurement(**(settings | values), final=lists["right"], blocks=[1] * n, **lists)

    return build


@pytest.fixture(autouse=True)
def fresh_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def verdict() -> Callable[..., bool]:
    return odd
