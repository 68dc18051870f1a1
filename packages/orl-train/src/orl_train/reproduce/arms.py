"""The arms of a reproduction, and the training of one: the same schedule and budget for all."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from orl_core.errors import ConfigError
from orl_core.protocols import Verifier
from orl_train import checkpoint
from orl_train.config import load_config, to_dict
from orl_train.errors import NonFiniteLossError, TrainError
from orl_train.metrics_log import metrics_log
from orl_train.model_folder import by_weights
from orl_train.orl import OrlConfig, OrlRun
from orl_train.orl.run import NoVerifiedAnswersError
from orl_train.reproduce.files import write_json

try:
    import fcntl
except ImportError:  # not on Windows: there two processes must be kept apart by --arm and --family
    fcntl = None

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Arm:
    """changes: settings of the recipe that make the arm, by dotted name. residual: whether it is decoded with the
    residual context, as it was trained."""

    name: str
    title: str
    changes: dict[str, Any] = field(default_factory=dict)
    residual: bool = True


BASE, ORL, SECOND = "base", "orl", "orl-2"
METHOD = (BASE, ORL, SECOND)  # the others are ablations and controls
SECOND_SEED = 1000  # more than a first stage's
ARMS = {
    arm.name: arm
    for arm in (
        Arm(BASE, "base"),
        Arm(ORL, "ORL"),
        Arm(SECOND, "ORL, trained on in a second stage"),
        Arm("no-aec", "ORL without AEC", {"loss.aec_weight": 0.0}),
        Arm("no-kl", "ORL without reverse KL", {"loss.kl_weight": 0.0}),
        Arm("no-residual", "ORL without residual", {"residual": False}, residual=False),
        Arm("off-policy", "ORL off-policy", {"off_policy": True}),
        Arm("rsft", "fresh verified answers, random noise (RSFT)", {"method": "rsft"}),
        Arm("pretrain", "base trained longer", {"method": "pretrain"}),
    )
}


@dataclass(frozen=True, slots=True)
class Job:
    """One arm with one seed in its own folder; the base has no seed and is not trained."""

    arm: Arm
    seed: int | None
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def model(self) -> Path:
        """Folder of the final model."""
        return self.folder / "model"


def make_jobs(folder: Path, headline_seeds: tuple[int, ...], ablation_seed: int, *, second: bool) -> list[Job]:
    """All jobs of a family, the base first. second: whether ORL has a second stage."""
    jobs: list[Job] = []
    for arm in ARMS.values():
        stages = {BASE: (None,), ORL: headline_seeds, SECOND: headline_seeds if second else ()}
        seeds = stages.get(arm.name, (ablation_seed,))
        jobs += [Job(arm, s, folder / (arm.name if s is None else f"{arm.name}-seed{s}")) for s in seeds]
    return jobs


def arm_config(job: Job, recipe: Path, start: Path) -> OrlConfig:
    """The settings of a job's run."""
    return load_config(OrlConfig, recipe, {"start": str(start), "seed": job.seed or 0, **job.arm.changes})


def second_config(job: Job, recipe: Path, first: Job, start: Path) -> OrlConfig:
    """The settings of a second stage: from the model of `first`, anchored to what that one started from, on other
    problems."""
    seed = SECOND_SEED + (job.seed or 0)
    return load_config(OrlConfig, recipe, {"start": str(first.model), "reference": str(start), "seed": seed})


def settings_key(value: dict[str, Any]) -> str:
    """Hash of settings."""
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def arm_key(config: OrlConfig) -> str:
    """Hash of a run's settings; its models count by their weights, not by their places."""
    return settings_key(by_weights(config))


def finished(job: Job, config: OrlConfig) -> dict[str, Any] | None:
    """What is recorded of a finished job, None if it is not finished. Raises ConfigError if its settings differ."""
    path = job.folder / "arm.json"
    if not path.is_file():
        return None
    record = checkpoint.read_json(path)
    if record.get("key") != arm_key(config):
        raise ConfigError(
            f"{job.folder} was made with other settings or another start model; use another --out, or remove the folder"
        )
    return record


def train(job: Job, config: OrlConfig, verifier: Verifier, say: Say) -> None:
    """Trains a job, or continues it. A run that collapses (no verified answer, a loss that is not finite) ends there:
    its last checkpoint is its result, and arm.json says why.

    Raises KeyboardInterrupt after a checkpoint is saved, TrainError if the run collapses before its first checkpoint.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    log, stopped = job.folder / "metrics.jsonl", None
    with metrics_log(log) as write:

        def progress(metrics: dict[str, float]) -> None:
            write(metrics)
            if metrics["step"] % 10 == 0 or metrics["step"] == config.updates:
                say(
                    f"update {metrics['step']}/{config.updates}: loss {metrics['loss']:.4f}, verified "
                    f"{metrics['reward']:.0%}, rollout TPF {metrics['tpf']:.2f}"
                )

        try:
            OrlRun(config, job.folder, verifier).run(report=progress)
        except (NoVerifiedAnswersError, NonFiniteLossError) as error:
            stopped = str(error)
            say(f"stopped: {stopped}")
            if not saved_models(job.folder):
                raise TrainError(f"{job.name} collapsed before its first checkpoint: {stopped}") from error
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    record = {
        "key": arm_key(config),
        "settings": to_dict(config),
        "updates": rows[-1]["step"],
        "minutes": sum(row["seconds_rollout"] + row["seconds_train"] for row in rows) / 60,
        "stopped": stopped,
    }
    write_json(job.folder / "arm.json", record)


def saved_models(folder: Path) -> list[Path]:
    """Model folders that a run has left, oldest first, the final one last."""
    steps = sorted(p for p in (folder / "checkpoints").glob("step-*") if (p / "run.json").is_file())
    models = [step / "model" for step in steps if not step.name.endswith(".tmp")]
    final = folder / "model"
    return models + [final] * (final / "config.json").is_file()


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """True while this process alone works in `folder`, False if another one does. The lock ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
        yield True
