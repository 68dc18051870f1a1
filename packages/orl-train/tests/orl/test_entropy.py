"""On-policy residual learning in small, on the model that ships with dlmrt: it makes up its mind in fewer steps."""

import pytest
import torch

from orl_core.arithmetic import problems, verify
from orl_core.decoders import Threshold
from orl_train.attention import attention_plan
from orl_train.config import build_config
from orl_train.evaluate import evaluate
from orl_train.orl import OrlConfig, OrlRun
from orl_train.orl.answers import prompt_ids
from orl_train.replay import ReplaySettings, make_packs, replay_logits, select_units

pytest.importorskip("dlmrt", reason="the start model is shipped with dlmrt")
pytestmark = pytest.mark.slow

RECIPE = {
    "start": "embedded:base",
    "updates": 14,
    "evaluate_every": 0,
    "rollout": {"prompts": 12, "groups": 1, "low": 0.95, "high": 0.995, "temperature": 0.0},
    "replay": {"states_per_response": 6},
    "optimizer": {"muon_lr": 0.01, "adam_lr": 1.5e-3, "residual_factor": 0.6, "warmup": 2, "decay_share": 0.4},
}


def decoder(run: OrlRun) -> Threshold:
    config = run.plain.config
    return Threshold(config.mask_token_id, config.canvas_length, 0.98)


def verified_states(run: OrlRun):
    """Packs of all states of the verified answers to some dev problems."""
    asked = problems("dev", 16)
    prompts = [prompt_ids(run.tokenizer, problem) for problem in asked]
    answers = run.rollout.rollout(prompts, decoder(run), max_new_tokens=128, seeds=range(len(asked)))
    kept = [
        answer
        for problem, answer in zip(asked, answers, strict=True)
        if verify(problem.prompt, run.tokenizer.decode(answer.response_ids.tolist()), problem.reference)
    ]
    assert len(kept) >= 12
    units = select_units(kept, range(len(kept)), ReplaySettings(states_per_response=1000), seed=0)
    return make_packs(units, run.plain.family, 2048)


@torch.no_grad()
def mean_entropy(run: OrlRun, packs) -> float:
    """Mean entropy (nats) of the unresolved positions of the packed states under the present weights."""
    entropies = []
    for packed in packs:
        plan = attention_plan(packed.visibility, batch=1, device=packed.ids.device)
        log_p = torch.log_softmax(replay_logits(run.plain, packed, plan, residual=True), -1)
        entropies.append(-(log_p.exp() * log_p).sum(-1)[packed.targets.unresolved])
    return float(torch.cat(entropies).mean())


def accuracy(run: OrlRun):
    return evaluate(run.rollout, run.tokenizer, decoder(run), problems("dev", 48)[16:], max_new_tokens=128)


def test_updates_lower_the_entropy_of_verified_states_and_keep_the_answers_right(tmp_path):
    run = OrlRun(build_config(OrlConfig, RECIPE, "test"), tmp_path)
    packs = verified_states(run)
    before, start = mean_entropy(run, packs), accuracy(run)
    metrics = []
    run.run(report=metrics.append)
    after, trained = mean_entropy(run, packs), accuracy(run)
    assert after < 0.9 * before
    assert trained.accuracy >= start.accuracy - 0.1
    assert sum(row["retained"] for row in metrics) >= 100
