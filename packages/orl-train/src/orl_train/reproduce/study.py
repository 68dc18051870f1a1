"""One family's part of a reproduction: which measurements it wants, and what dev chooses."""

from functools import cached_property
from itertools import product
from math import sqrt
from pathlib import Path

from orl_core.noise import Family
from orl_core.protocols import Verifier
from orl_train.config import load_config, to_dict
from orl_train.orl import OrlConfig
from orl_train.reproduce.arms import BASE, METHOD, ORL, SECOND, Job, arm_config, make_jobs, saved_models, second_config
from orl_train.reproduce.config import ReproduceConfig, start_folder
from orl_train.reproduce.sweep import Choice, Measurement, Model, Setting, Thresholds, choose, most_accurate

Wanted = tuple[Model, Setting]


class FamilyStudy:
    """Jobs and measurements of a family below `out`. Raises ConfigError for a missing start model or recipe."""

    def __init__(self, config: ReproduceConfig, family: Family, out: Path, verifier: Verifier) -> None:
        self.config, self.family, self.verifier = config, family, verifier
        self.settings = config.family(family)
        self.start = start_folder(self.settings, family)
        second = self.settings.second is not None
        self.jobs = make_jobs(out / family, config.headline_seeds, config.ablation_seed, second=second)
        self.base = next(job for job in self.jobs if job.arm.name == BASE)
        self.orl = next(job for job in self.jobs if job.arm.name == ORL and job.seed == config.ablation_seed)
        self.recipe = self.run_config(self.orl)
        self.second = to_dict(load_config(OrlConfig, Path(self.settings.second))) if self.settings.second else None
        self._models: dict[Path, Model] = {}

    def run_config(self, job: Job) -> OrlConfig:
        first = self.first_stage(job)
        if first is None or self.settings.second is None:
            return arm_config(job, Path(self.settings.recipe), self.start)
        return second_config(job, Path(self.settings.second), first, self.start)

    def first_stage(self, job: Job) -> Job | None:
        """What a second stage starts from; None for any other job."""
        if job.arm.name != SECOND:
            return None
        return next(other for other in self.jobs if other.arm.name == ORL and other.seed == job.seed)

    def models(self, job: Job) -> list[Model]:
        """The models of a job among which dev chooses; none before it is trained."""
        folders = [self.start] if job is self.base else []
        if (job.folder / "arm.json").is_file():
            folders = saved_models(job.folder)[-self.config.candidates :]
        return [self._model(folder, job.folder) for folder in folders]

    def _model(self, folder: Path, home: Path) -> Model:
        if folder not in self._models:
            self._models[folder] = Model(folder, home, self.recipe.rollout, self.config.batch, self.verifier)
        return self._models[folder]

    def release(self) -> None:
        """Forgets the loaded models."""
        self._models.clear()

    def residuals(self, job: Job) -> list[bool]:
        """How a job's models are decoded: as trained, and for the 2x2 also without the residual context."""
        return [True, False] if job in (self.base, self.orl) else [job.arm.residual]

    def sweep(self, job: Job, residual: bool) -> list[Wanted]:
        """The measurements on dev: every model at every threshold."""
        return [
            (model, Setting("dev", self.config.dev_problems, at, residual))
            for model in self.models(job)
            for at in self.grid
        ]

    def dev(self, job: Job, residual: bool) -> list[Measurement]:
        """The finished sweep; empty if it is not finished."""
        found = [model.find(setting) for model, setting in self.sweep(job, residual)]
        complete = [point for point in found if point is not None]
        return complete if len(complete) == len(found) else []

    @cached_property
    def grid(self) -> list[Thresholds]:
        """Where models are measured on dev."""
        if self.family == "masked":
            return [Thresholds(threshold) for threshold in self.settings.grid]
        rollout = self.recipe.rollout
        confidence = self.settings.confidence_thresholds or (rollout.confidence_threshold,)
        stability = self.settings.stability_thresholds or (rollout.stability_threshold,)
        return [Thresholds(*at) for at in product(self.settings.grid, confidence, stability)]

    @cached_property
    def middle(self) -> Thresholds:
        """The middle of the thresholds that rollouts draw from."""
        rollout = self.recipe.rollout
        if self.family == "masked":
            return Thresholds((rollout.low + rollout.high) / 2)
        return Thresholds(sqrt(rollout.low * rollout.high), rollout.confidence_threshold, rollout.stability_threshold)

    def best_of_base(self) -> Measurement | None:
        points = self.dev(self.base, True)
        return most_accurate(points) if points else None

    def floor(self) -> float | None:
        """The least accuracy on dev: the base's best less the margin. None before the base is measured."""
        best = self.best_of_base()
        return None if best is None else best.accuracy - self.config.margin / 100

    def choice(self, job: Job, residual: bool) -> Choice | None:
        """What dev chooses; None before the sweeps of the job and of the base are finished."""
        floor, points = self.floor(), self.dev(job, residual)
        return choose(points, floor) if floor is not None and points else None

    def wanted(self, job: Job) -> dict[str, Wanted | None]:
        """The measurements that follow the choice, by role; None where a choice that one needs is not there yet.

        chosen: at the chosen threshold on test. no-residual: the same, decoded without the residual context.
        best: the base where it is most accurate. same: an ablation at the threshold chosen for ORL.
        sampled: on dev as rollouts are drawn, at the middle of their thresholds: how diverse the answers are.
        """
        trained = job.arm.residual
        choice = self.choice(job, trained)
        wanted = {"chosen": self._test(job, choice, trained)}
        if job in (self.base, self.orl):
            wanted["no-residual"] = self._test(job, self.choice(job, False), False)
        if job is self.base:
            best = self.best_of_base()
            wanted["best"] = self._test(job, None if best is None else Choice(best, True), True)
        if job.arm.name in METHOD:
            setting = Setting("dev", self.config.dev_problems, self.middle, True, self.recipe.rollout.temperature)
            wanted["sampled"] = None if choice is None else (self._named(job, choice), setting)
        else:
            orl = self.choice(self.orl, True)
            same = None if choice is None or orl is None else Choice(choice.point, True)
            wanted["same"] = self._test(job, same, trained, orl.point.at if orl else None)
        return wanted

    def _test(self, job: Job, choice: Choice | None, residual: bool, at: Thresholds | None = None) -> Wanted | None:
        if choice is None:
            return None
        setting = Setting("test", self.config.test_problems, at or choice.point.at, residual)
        return self._named(job, choice), setting

    def _named(self, job: Job, choice: Choice) -> Model:
        return next(model for model in self.models(job) if model.name == choice.point.model)

    def result(self, job: Job, role: str) -> Measurement | None:
        """A measurement that follows the choice, if it was made."""
        wanted = self.wanted(job).get(role)
        return wanted[0].find(wanted[1]) if wanted else None
