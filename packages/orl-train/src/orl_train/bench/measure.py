"""Times whole training steps (rollout with capture, replay, backward, optimizer) with and without each part.

Two ranks are measured one after the other in this process; a step lasts as long as its slower rank. Reducing gradients
and gathering trajectories are not part of it. Verification is left out: every answer is replayed in all of its states.
"""

import copy
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeVar

import torch

from orl_core.capture import CaptureMode
from orl_core.errors import ConfigError
from orl_core.losses import OrlLossConfig
from orl_core.trajectory import Trajectory
from orl_train import __version__
from orl_train.bench.padded import padded_backward, state_length
from orl_train.bench.workload import Workload
from orl_train.engine_rollout import make_rollout
from orl_train.errors import TrainError
from orl_train.optim import OptimizerConfig, build_optimizers
from orl_train.replay import (
    ReplaySettings,
    ReplaySums,
    cost_model,
    make_packs,
    rank_share,
    replay_backward,
    select_units,
)

RANKS = 2
_TOLERANCE = 1e-5
_EVERY_STATE = 1_000_000
T = TypeVar("T")


class BenchError(TrainError):
    """The arms of a bench do not compute the same."""


@dataclass(frozen=True, slots=True)
class Arm:
    """Which parts a training step uses."""

    name: str
    packed: bool
    balanced: bool
    capture: CaptureMode


ARMS = (
    Arm("off", packed=False, balanced=False, capture="sync"),
    Arm("packed", packed=True, balanced=False, capture="sync"),
    Arm("balanced", packed=True, balanced=True, capture="sync"),
    Arm("all", packed=True, balanced=True, capture="async"),
)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of a step and of its phases, each phase as long as its slower rank.

    cpu: of the step, the processor's own time (all threads), which other programs on the machine do not lengthen.
    """

    rollout: float
    replay: float
    optimizer: float
    cpu: float

    @property
    def step(self) -> float:
        return self.rollout + self.replay + self.optimizer


class Bench:
    """Training steps of one workload; every step starts from the same weights.

    token_budget: tokens of one pack. engine: of the rollouts, as in make_rollout.
    """

    def __init__(self, workload: Workload, *, token_budget: int = 4096, engine: str = "auto") -> None:
        self.workload, self.model = workload, workload.model.train()
        self.replay = ReplaySettings(states_per_response=_EVERY_STATE, token_budget=token_budget)
        self.loss = OrlLossConfig()
        self.reference = copy.deepcopy(self.model).requires_grad_(False).eval()
        self.optimizers = build_optimizers(self.model, OptimizerConfig())
        self.engines = {
            mode: make_rollout(self.model, workload.stop_ids, engine, capture=mode) for mode in ("sync", "async")
        }
        self.costs = cost_model(self.model.config)
        self._start = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def check(self, rollouts: int) -> None:
        """Raises ConfigError if a rank would have no answer."""
        if len(self.workload.prompts) * rollouts < RANKS:
            raise ConfigError("one prompt with one rollout leaves a rank without answers; give two of either")

    def step(self, arm: Arm, rollouts: int) -> tuple[Seconds, ReplaySums, dict[str, int]]:
        """One training step; seconds, losses of both ranks together, and sizes.

        Raises ConfigError if a rank would have no answer.
        """
        self.check(rollouts)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self._start[name])
        requests = [(p, r) for p in range(len(self.workload.prompts)) for r in range(rollouts)]
        timed = [_timed(lambda rank=rank: self._answer(arm, requests[rank::RANKS])) for rank in range(RANKS)]
        answers = [trajectories for _, _, trajectories in timed]
        replays = [_timed(lambda rank=rank: self._replay(arm, answers, rank)) for rank in range(RANKS)]
        optimizer = [_timed(self._optimize)]
        phases: list[list[tuple[float, float, Any]]] = [timed, replays, optimizer]
        wall = [max(wall for wall, _, _ in phase) for phase in phases]
        seconds = Seconds(*wall, cpu=sum(max(cpu for _, cpu, _ in phase) for phase in phases))
        sums = ReplaySums()
        for name in asdict(sums):
            setattr(sums, name, sum(getattr(part, name) for _, _, part in replays))
        states = sum(trajectory.forwards for part in answers for trajectory in part)
        return seconds, sums, {"responses": len(requests), "states": states, "replayed_tokens": sums.tokens}

    def _answer(self, arm: Arm, requests: Sequence[tuple[int, int]]) -> list[Trajectory]:
        return self.engines[arm.capture].rollout(
            [self.workload.prompts[p] for p, _ in requests],
            self.workload.decoder,
            max_new_tokens=self.workload.max_new_tokens,
            seeds=[1_000 * p + r for p, r in requests],
        )

    def _replay(self, arm: Arm, answers: Sequence[Sequence[Trajectory]], rank: int) -> ReplaySums:
        """What `rank` replays: its own answers, or its share by cost of everybody's."""
        owned = [select_units(part, range(len(part)), self.replay, seed=0) for part in answers]
        units, everybodys = owned[rank], [unit for part in owned for unit in part]
        family, common = self.model.family, {"responses": sum(len(part) for part in answers), "residual": True}
        if not arm.packed:
            length = state_length(everybodys)
            return padded_backward(self.model, self.reference, units, family, self.loss, length=length, **common)
        if arm.balanced:
            units = rank_share(everybodys, self.costs, rank, RANKS)
        packs = make_packs(units, family, self.replay.token_budget)
        return replay_backward(self.model, self.reference, packs, self.loss, **common)

    def _optimize(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def compare(
    bench: Bench, rollouts: int, repeat: int, report: Callable[[str, Seconds], None] = lambda *_: None
) -> dict[str, Any]:
    """Medians of `repeat` steps of every arm at `rollouts` rollouts per prompt; the order alternates.

    Raises BenchError if an arm's loss differs from the first one's by more than 1e-5 of it.
    """
    seconds: dict[str, list[Seconds]] = {arm.name: [] for arm in ARMS}
    losses: dict[str, float] = {}
    sizes: dict[str, dict[str, int]] = {}
    for trial in range(repeat):
        for arm in ARMS if trial % 2 == 0 else ARMS[::-1]:
            taken, sums, sizes[arm.name] = bench.step(arm, rollouts)
            seconds[arm.name].append(taken)
            losses[arm.name] = sums.total
            report(f"{rollouts} rollouts, {arm.name}", taken)
    _check_losses(losses)
    step = {name: median(s.step for s in values) for name, values in seconds.items()}
    cpu = {name: median(s.cpu for s in values) for name, values in seconds.items()}
    return {
        "speedup": step["off"] / step["all"],
        "cpu_speedup": cpu["off"] / cpu["all"],
        "parts": _parts(step),
        "cpu_parts": _parts(cpu),
        "seconds": {
            name: {"step": step[name], "cpu": cpu[name]}
            | {phase: median(getattr(s, phase) for s in values) for phase in ("rollout", "replay", "optimizer")}
            for name, values in seconds.items()
        },
        "loss": losses,
        "responses": sizes["all"]["responses"],
        "states": sizes["all"]["states"],
        "replayed_tokens": {name: size["replayed_tokens"] for name, size in sizes.items()},
    }


def _parts(step: dict[str, float]) -> dict[str, float]:
    """What each arm gives beyond the one before it; the product is the speedup."""
    return {
        "packing_and_staircase": step["off"] / step["packed"],
        "cost_balancing": step["packed"] / step["balanced"],
        "asynchronous_capture": step["balanced"] / step["all"],
    }


def bench_report(
    workload: Workload,
    rollouts: Sequence[int],
    repeat: int,
    *,
    engine: str = "auto",
    report: Callable[[str, Seconds], None] = lambda *_: None,
) -> dict[str, Any]:
    """The JSON object of `orl-train bench`: the comparison at every number of rollouts, and what it ran on.

    `speedup` and `parts` are those at 16 rollouts per prompt, or at the last number if 16 is not among them; the same
    with `cpu_` are ratios of processor time.
    """
    bench = Bench(workload, engine=engine)
    for number in rollouts:
        bench.check(number)
    bench.step(ARMS[-1], RANKS)  # warm-up, with an answer for each rank
    compared = {number: compare(bench, number, repeat, report) for number in rollouts}
    headline = 16 if 16 in compared else rollouts[-1]
    return {
        "speedup": compared[headline]["speedup"],
        "rollouts": headline,
        "cpu_speedup": compared[headline]["cpu_speedup"],
        "parts": compared[headline]["parts"],
        "cpu_parts": compared[headline]["cpu_parts"],
        "by_rollouts": {str(number): result for number, result in compared.items()},
        "repeat": repeat,
        "ranks": RANKS,
        "model": workload.name,
        "prompt_tokens": [len(prompt) for prompt in workload.prompts],
        "canvas_length": workload.model.config.canvas_length,
        "max_new_tokens": workload.max_new_tokens,
        "decoder": repr(workload.decoder),
        "engine": type(bench.engines["async"]).__name__,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[1],
        "machine": platform.processor() or platform.machine(),
        "versions": {"orl-train": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _check_losses(losses: dict[str, float]) -> None:
    expected = losses[ARMS[0].name]
    for name, loss in losses.items():
        if not abs(loss - expected) <= _TOLERANCE * abs(expected):
            raise BenchError(
                f"the loss of arm {name!r} is {loss}, that of {ARMS[0].name!r} {expected}; they must agree"
            )


def _timed(work: Callable[[], T]) -> tuple[float, float, T]:
    """(seconds, seconds of processor time, result)."""
    began, cpu = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - began, time.process_time() - cpu, result
