"""The rollouts of one update: fresh prompts, answers of the behaviour model, verdicts."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer

from orl_core.arithmetic import Problem, draw_problem
from orl_core.protocols import RolloutEngine, Verifier
from orl_core.trajectory import Trajectory
from orl_train.data.noisy_batch import sample_generator
from orl_train.orl.config import OrlConfig

PROBLEM_SEED = 1_000_003  # ORL's prompts are other training problems than pretraining's

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Answers:
    """Rollouts of one update on one rank. samples[i] numbers trajectory i in the whole run; failures counts answers on
    which the verifier raised: they count as not verified."""

    trajectories: list[Trajectory] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    verified: list[bool] = field(default_factory=list)
    failures: int = 0

    @property
    def kept(self) -> list[tuple[Trajectory, int]]:
        """Verified trajectories with their numbers."""
        rows = zip(self.trajectories, self.samples, self.verified, strict=True)
        return [(trajectory, sample) for trajectory, sample, ok in rows if ok]


def problem_of(seed: int, index: int) -> Problem:
    """Training problem `index` of an ORL run."""
    return draw_problem("train", seed + PROBLEM_SEED, index)


def prompt_ids(tokenizer: Tokenizer, problem: Problem) -> torch.Tensor:
    """int64 [P]."""
    return torch.tensor(tokenizer.encode(problem.prompt + "\n").ids)


def collect_answers(
    rollout: RolloutEngine,
    tokenizer: Tokenizer,
    verifier: Verifier,
    config: OrlConfig,
    model_config: Any,
    *,
    update: int,
    rank: int = 0,
    world: int = 1,
) -> Answers:
    """Answers this rank's share of the update's prompts. What an answer is does not depend on the number of ranks."""
    settings, seed = config.rollout, config.seed
    total = settings.prompts * settings.rollouts
    answers = Answers()
    draws = torch.rand(settings.groups, generator=sample_generator(seed, update, "threshold")).tolist()
    for group, draw in enumerate(draws):
        members = [i for i in range(rank, total, world) if i // settings.rollouts % settings.groups == group]
        if not members:
            continue
        problems = [problem_of(seed, update * settings.prompts + i // settings.rollouts) for i in members]
        samples = [update * total + i for i in members]
        trajectories = rollout.rollout(
            [prompt_ids(tokenizer, problem) for problem in problems],
            settings.decoder(model_config, draw),
            max_new_tokens=settings.max_new_tokens,
            seeds=[seed * PROBLEM_SEED + sample for sample in samples],
            residual=config.residual,
        )
        answers.trajectories += trajectories
        answers.samples += samples
        for problem, trajectory in zip(problems, trajectories, strict=True):
            text = tokenizer.decode(trajectory.response_ids.tolist())
            answers.verified.append(trajectory.finish_reason == "stop" and _verdict(verifier, problem, text, answers))
    return answers


def _verdict(verifier: Callable[..., bool], problem: Problem, text: str, answers: Answers) -> bool:
    try:
        return bool(verifier(problem.prompt, text, problem.reference))
    except Exception:  # a verifier may run anything; what it raises must not end the run
        answers.failures += 1
        _log.exception("the verifier failed on an answer to %r", problem.prompt)
        return False


def entropy_at(trajectories: list[Trajectory], step: int) -> float:
    """Mean entropy (nats) of the unresolved positions at step `step` of every block that has it; 0 without any."""
    parts = [
        block.entropy[step][block.unresolved[step]]
        for trajectory in trajectories
        for block in trajectory.blocks
        if -block.steps <= step < block.steps
    ]
    joined = torch.cat(parts) if parts else torch.zeros(0)
    return float(joined.mean()) if len(joined) else 0.0
