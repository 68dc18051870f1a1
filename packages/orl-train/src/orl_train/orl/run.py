"""One ORL run.

Each update answers fresh prompts with the current weights, keeps the answers whose whole derivation verifies, replays
some of their states exactly as the rollout visited them (same canvas, same residual context), takes one step and
discards the trajectories.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed

from orl_core.arithmetic import problems, verify
from orl_core.packing import PackedReplay, ReplayUnit
from orl_core.protocols import Verifier
from orl_core.trajectory import Trajectory
from orl_train import checkpoint
from orl_train.config import to_dict
from orl_train.engine_rollout import make_rollout, refresh_rollout
from orl_train.errors import NonFiniteLossError, TrainError
from orl_train.evaluate import evaluate
from orl_train.interrupt import deferred_interrupt, on_any_rank
from orl_train.lora import add_lora
from orl_train.model_folder import by_weights, model_folder
from orl_train.optim import build_optimizers, schedule_factor
from orl_train.orl.answers import Answers, collect_answers, entropy_at
from orl_train.orl.config import OrlConfig
from orl_train.orl.controls import control_gradients, solution_pairs, verified_pairs
from orl_train.orl.start import check_method, check_sharded, load_model, load_tokenizer, reference_model, stop_ids
from orl_train.replay import ReplaySums, cost_model, make_packs, rank_share, replay_backward, select_units
from orl_train.saving import (
    Checkpoints,
    copy_companions,
    keep_weights_in_model_folder,
    resume_run,
    save_run,
    save_weights,
)
from orl_train.sharded_run import resume_sharded_run, save_sharded_run
from orl_train.sharding import (
    add_up_gradients,
    clip_gradients,
    is_sharded,
    rank_packs,
    shard,
    sharding_asked,
    whole,
    whole_state,
)
from orl_train.tracking import tracker_options, tracking

Kept = Sequence[tuple[Trajectory, int]]


class NoVerifiedAnswersError(TrainError):
    """No rollout has verified for several updates in a row."""


class VerifierError(TrainError):
    """The verifier failed on every answer of an update."""


class OrlRun:
    """Models, optimizers and rollout engines of a run; `run()` trains.

    verifier: decides which answers are learned from (default: the arithmetic task's strict one).
    tracker: where metrics go besides `report`, see `orl_train.tracking`.
    Raises ConfigError for a start or reference model that is missing or does not fit.
    """

    def __init__(self, config: OrlConfig, out: Path, verifier: Verifier = verify, *, tracker: str = "none") -> None:
        self.config, self.out, self.verifier = config, out, verifier
        # the schedules count updates, whatever the number of ranks
        options = tracker_options(tracker, out)
        self.accelerator = Accelerator(mixed_precision=config.precision, step_scheduler_with_optimizer=False, **options)
        set_seed(config.seed)
        self.start = model_folder(config.start)
        model = load_model(self.start)
        check_method(config, model)
        self.tokenizer = load_tokenizer(self.start, model)
        stops = stop_ids(model)
        if config.lora is not None:
            add_lora(model, config.lora)
        self.reference = reference_model(config, model)
        frozen = copy.deepcopy(model).eval().to(self.accelerator.device) if config.off_policy else None
        if sharding_asked(self.accelerator):
            check_sharded(config)
            shard(self.accelerator, model)
            if isinstance(self.reference, torch.nn.Module):
                shard(self.accelerator, self.reference)
        if self.reference is not None:
            self.reference.to(self.accelerator.device)
        self.optimizers: Any = build_optimizers(model, config.optimizer)
        self.schedules: Any = [
            torch.optim.lr_scheduler.LambdaLR(o, lambda step: schedule_factor(step, config.updates, config.optimizer))
            for o in self.optimizers
        ]
        self.plain: Any = model
        if not is_sharded(model):
            prepared: Any = self.accelerator.prepare(model, *self.optimizers, *self.schedules)
            count = len(self.optimizers)
            self.optimizers, self.schedules = prepared[1 : 1 + count], prepared[1 + count :]
            self.plain = self.accelerator.unwrap_model(prepared[0])
            keep_weights_in_model_folder(self.accelerator)
        self.rollout = make_rollout(self.plain, stops, config.rollout.engine)
        self.behaviour = make_rollout(frozen, stops, config.rollout.engine) if frozen else self.rollout

    def run(self, *, resume: bool = True, report: Callable[[dict[str, float]], None] = lambda _: None) -> Path:
        """Trains and returns the folder of the final model, `out/model`; `report` receives each update's metrics.

        The first Ctrl-C saves a checkpoint after the update it falls into, then raises KeyboardInterrupt.
        Raises NonFiniteLossError, NoVerifiedAnswersError, VerifierError, CheckpointError.
        """
        config, main = self.config, self.accelerator.is_main_process
        first = self._resume() if resume else 0
        barren = 0
        with deferred_interrupt() as interrupt, tracking(self.accelerator, to_dict(config)):
            for update in range(first, config.updates):
                metrics = self.update(update)
                learned = metrics["retained"] > 0 or config.method == "pretrain"
                barren = 0 if learned else barren + 1
                if barren >= config.max_barren:
                    raise NoVerifiedAnswersError(
                        f"no answer verified in {barren} updates in a row; make the rollouts more careful (a lower "
                        "entropy bound, a higher threshold), train the start model longer, or raise max_barren"
                    )
                done = update + 1
                if config.evaluate_every and done % config.evaluate_every == 0:
                    metrics |= self.evaluation()
                self.accelerator.log(metrics, step=done)
                if main:
                    report(metrics)
                stop = on_any_rank(self.accelerator, interrupt.requested)
                if stop or (done % config.save_every == 0 and done < config.updates):
                    self._save(done)
                if stop:
                    raise KeyboardInterrupt
        final = self.out / "model"
        write = self._model_writer(torch.bfloat16)
        if main:
            checkpoint.write_folder(final, write)
        self.accelerator.wait_for_everyone()
        return final

    def update(self, update: int) -> dict[str, float]:
        """Rolls out, trains on what verified, and returns the update's metrics; "pretrain" learns from the task's own
        solutions and rolls nothing out.

        Raises VerifierError, on every rank, if the verifier raised on every answer.
        """
        began = time.perf_counter()
        world = self.accelerator.num_processes
        answers = self._answers(update)
        rolled = time.perf_counter()
        trajectories = answers.trajectories
        counts = (sum(answers.verified), len(answers.verified), answers.failures)
        counts += (sum(len(t.response_ids) for t in trajectories), sum(t.forwards for t in trajectories))
        verified, answered, failures, generated, forwards = self._total(counts)
        if failures and failures == answered:
            raise VerifierError(f"the verifier failed on all {answered:g} answers of update {update}; see the log")
        kept = sorted(gather_object(answers.kept) if world > 1 else answers.kept, key=lambda pair: pair[1])
        sums = ReplaySums()
        if kept or self.config.method == "pretrain":
            with self.accelerator.autocast():
                sums = self._gradients(kept, update)
            self._step(sums, update)
        return {
            "step": update + 1,
            "loss": sums.total,
            "loss_prediction": sums.prediction,
            "loss_kl": sums.kl,
            "loss_aec": sums.aec,
            "uncertain": sums.uncertain,
            "anchored": sums.anchored,
            "tokens": sums.tokens,
            "reward": verified / max(1, answered),
            "retained": len(kept),
            "verifier_failures": failures,
            "tpf": generated / max(1, forwards),
            **{f"entropy_step_{step}": entropy_at(trajectories, step) for step in (0, 1, 2, 4, 8)},
            "residual_ratio": self._residual_ratio(trajectories),
            "lr": self.schedules[0].get_last_lr()[0],
            "seconds_rollout": rolled - began,
            "seconds_train": time.perf_counter() - rolled,
        }

    def _answers(self, update: int) -> Answers:
        """This rank's rollouts."""
        if self.config.method == "pretrain":
            return Answers()
        refresh_rollout(self.rollout, self.plain)
        place = {"rank": self.accelerator.process_index, "world": self.accelerator.num_processes}
        config, shape = self.config, self.plain.config
        return collect_answers(self.behaviour, self.tokenizer, self.verifier, config, shape, update=update, **place)

    def evaluation(self) -> dict[str, float]:
        """Greedy accuracy and TPF on dev problems, at the middle of the rollouts' thresholds."""
        settings = replace(self.config.rollout, temperature=0.0)
        refresh_rollout(self.rollout, self.plain)
        result = evaluate(
            self.rollout,
            self.tokenizer,
            settings.decoder(self.plain.config, 0.5),
            problems("dev", self.config.evaluate_problems),
            max_new_tokens=settings.max_new_tokens,
            residual=self.config.residual,
        )
        return {f"dev_{name}": float(value) for name, value in asdict(result).items()}

    def _total(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks."""
        if self.accelerator.num_processes == 1:
            return list(values)
        total: Any = self.accelerator.reduce(torch.tensor(values, dtype=torch.float64, device=self.accelerator.device))
        return total.tolist()

    def _model_writer(self, dtype: torch.dtype) -> Callable[[Path], None]:
        """Writes the present model to a folder. Every rank must call this, one of them what it returns."""
        state = whole_state(self.plain)

        def write(folder: Path) -> None:
            save_weights(self.plain, state, folder, dtype)
            copy_companions(self.start, folder)

        return write

    @cached_property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.out / "checkpoints", self.config.keep, by_weights(self.config))

    def _resume(self) -> int:
        if is_sharded(self.plain):
            return resume_sharded_run(self.plain, self.optimizers, self.schedules, self._checkpoints)
        return resume_run(self.accelerator, self._checkpoints)

    def _save(self, done: int) -> None:
        write = self._model_writer(torch.float32)
        if not is_sharded(self.plain):
            save_run(self.accelerator, write, self._checkpoints, done)
            return
        state = (self.plain, self.optimizers, self.schedules)
        save_sharded_run(self.accelerator, *state, write, self._checkpoints, done)

    def _gradients(self, kept: Kept, update: int) -> ReplaySums:
        config, accelerator = self.config, self.accelerator
        if config.method == "orl":
            trajectories, samples = [t for t, _ in kept], [s for _, s in kept]
            units = select_units(trajectories, samples, config.replay, config.seed)
            sums = replay_backward(
                self.plain,
                self.reference,
                self._packs(units),
                config.loss,
                responses=len(kept),
                residual=config.residual,
                backward=accelerator.backward,
            )
        else:
            eos_id: Any = self.plain.config.eos_token_id
            pairs = (
                verified_pairs(kept)
                if config.method == "rsft"
                else solution_pairs(config, self.tokenizer, eos_id, update)
            )
            sums = control_gradients(accelerator, self.plain, pairs, config, update)
        if accelerator.num_processes > 1:  # the loss is normalised by the whole update, so gradients are summed
            add_up_gradients(self.plain)
            if config.method == "orl":
                sums = ReplaySums(*self._total(astuple(sums)))  # pyright: ignore[reportArgumentType] (whole numbers)
        return sums

    def _packs(self, units: Sequence[ReplayUnit]) -> list[PackedReplay]:
        """This rank's packs of an update's units; the ranks of a sharded model have as many."""
        model, budget, costs = self.plain, self.config.replay.token_budget, cost_model(self.plain.config)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        blocks: int | None = model.context_blocks
        if is_sharded(model):
            width = model.config.hidden_size
            share = {"rank": rank, "world": world, "width": width, "context_blocks": blocks}
            return rank_packs(units, costs, model.family, budget, **share)
        return make_packs(rank_share(units, costs, rank, world), model.family, budget, blocks)

    def _step(self, sums: ReplaySums, update: int) -> None:
        if not math.isfinite(sums.total):
            raise NonFiniteLossError(
                f"the loss is {sums.total} at update {update}; the last good checkpoint is "
                f"{checkpoint.latest(self.out / 'checkpoints')}. Resume it with a lower learning rate"
            )
        if is_sharded(self.plain):
            clip_gradients(self.plain, self.config.optimizer.clip_norm)
        else:
            self.accelerator.clip_grad_norm_(self.plain.parameters(), self.config.optimizer.clip_norm)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def _residual_ratio(self, trajectories: Sequence[Trajectory]) -> float:
        """Mean |alpha g(z)| / |E[x]| over the later states of one block."""
        embedding = whole(self.plain.embedding)  # on every rank, whether it has a block or not
        block = next((b for t in trajectories for b in t.blocks if b.steps > 1), None)
        if block is None or not self.config.residual:
            return 0.0
        signal = self.plain.residual_signal(block.z[1:].to(embedding.device))
        if signal is None:
            return 0.0
        added = signal.norm(dim=-1)
        embedded = embedding[block.canvas[1:].to(embedding.device)].norm(dim=-1)
        return float((added / embedded.clamp(min=1e-6)).mean())
