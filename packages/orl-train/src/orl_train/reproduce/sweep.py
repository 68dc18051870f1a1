"""Measurements of an arm's models, each kept in a file named by its settings, so that none is made twice."""

import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from orl_core.arithmetic import problems
from orl_core.protocols import RolloutEngine, Verifier
from orl_train import checkpoint
from orl_train.engine_rollout import make_rollout
from orl_train.evaluate import grade, summarize
from orl_train.model_folder import fingerprint
from orl_train.orl.config import RolloutSettings
from orl_train.orl.start import load_model, load_tokenizer, stop_ids
from orl_train.reproduce.arms import settings_key
from orl_train.reproduce.files import write_json


@dataclass(frozen=True, slots=True, order=True)
class Thresholds:
    """Where on its frontier a model decodes.

    threshold: entropy bound (nats) or confidence threshold. confidence_threshold (mean nats), stability_threshold: when
    a block of the uniform family may stop, as in RolloutSettings; None in the masked family.
    """

    threshold: float
    confidence_threshold: float | None = None
    stability_threshold: int | None = None

    def __str__(self) -> str:
        return ", ".join(f"{value:g}" for value in astuple(self) if value is not None)

    def rollout(self, settings: RolloutSettings) -> RolloutSettings:
        """The same rollouts, at these thresholds."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        threshold = given.pop("threshold")
        return replace(settings, low=threshold, high=threshold, **given)


def thresholds_of(summary: dict[str, Any]) -> Thresholds:
    """The thresholds in a measurement's summary."""
    return Thresholds(**{field.name: summary[field.name] for field in fields(Thresholds)})


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is measured. temperature: 0 is greedy."""

    split: Literal["dev", "test"]
    problems: int
    at: Thresholds
    residual: bool
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measures of evaluate.Evaluation and, for each problem in order, what they are made of.

    model: folder of the model below the arm's. right, final: 1 or 0.
    """

    model: str
    split: str
    threshold: float
    confidence_threshold: float | None
    stability_threshold: int | None
    residual: bool
    temperature: float
    n: int
    accuracy: float
    final_accuracy: float
    tpf: float
    tpf_commit: float
    diversity: float
    seconds: float
    right: list[int]
    final: list[int]
    tokens: list[int]
    forwards: list[int]
    blocks: list[int]

    @property
    def at(self) -> Thresholds:
        return Thresholds(self.threshold, self.confidence_threshold, self.stability_threshold)

    def summary(self) -> dict[str, Any]:
        """All but the lists."""
        return {name: value for name, value in asdict(self).items() if not isinstance(value, list)}


class Model:
    """A model folder, loaded when it is first measured. home: folder of its arm, which keeps the measurements."""

    def __init__(self, folder: Path, home: Path, rollout: RolloutSettings, batch: int, verifier: Verifier) -> None:
        self.folder, self.home, self.settings = folder, home, rollout
        self.batch, self.verifier = batch, verifier
        inside = folder.is_relative_to(home)
        self.name = str(folder.relative_to(home)) if inside else "start"

    @cached_property
    def _weights(self) -> str:
        return fingerprint(self.folder)

    @cached_property
    def _loaded(self) -> tuple[RolloutEngine, Any, Any]:
        model = load_model(self.folder).eval()
        return (
            make_rollout(model, stop_ids(model), self.settings.engine),
            load_tokenizer(self.folder, model),
            model.config,
        )

    def _path(self, setting: Setting) -> Path:
        answering = {name: getattr(self.settings, name) for name in ("max_new_tokens", "max_steps")}
        key = settings_key({"weights": self._weights, **asdict(setting), **answering})
        return self.home / "measurements" / f"{setting.split}-{setting.at.threshold:g}-{key}.json"

    def find(self, setting: Setting) -> Measurement | None:
        """The measurement, if it was made."""
        path = self._path(setting)
        return Measurement(**checkpoint.read_json(path)) if path.is_file() else None

    def measure(self, setting: Setting) -> Measurement:
        """The measurement, made now if it was not. Only whole ones are kept."""
        found = self.find(setting)
        if found is not None:
            return found
        began = time.perf_counter()
        rollout, tokenizer, config = self._loaded
        at = replace(setting.at.rollout(self.settings), temperature=setting.temperature)
        graded = grade(
            rollout,
            tokenizer,
            at.decoder(config, 0.0),
            problems(setting.split, setting.problems),
            max_new_tokens=self.settings.max_new_tokens,
            residual=setting.residual,
            batch=self.batch,
            verifier=self.verifier,
        )
        made = Measurement(
            model=self.name,
            split=setting.split,
            **asdict(setting.at),
            residual=setting.residual,
            temperature=setting.temperature,
            **asdict(summarize(graded)),
            seconds=time.perf_counter() - began,
            right=[int(g.right) for g in graded],
            final=[int(g.final) for g in graded],
            tokens=[g.tokens for g in graded],
            forwards=[g.forwards for g in graded],
            blocks=[g.blocks for g in graded],
        )
        write_json(self._path(setting), asdict(made))
        return made


@dataclass(frozen=True, slots=True)
class Choice:
    """A measurement chosen on dev. reached: whether its accuracy reaches the floor; if none does, the most accurate
    one stands in."""

    point: Measurement
    reached: bool


def most_accurate(points: Sequence[Measurement]) -> Measurement:
    """The most accurate point; of several, the fastest."""
    return max(points, key=lambda p: (p.accuracy, p.tpf))


def choose(points: Sequence[Measurement], floor: float) -> Choice:
    """The fastest point whose accuracy is at least `floor`; of several, the most accurate."""
    able = [p for p in points if p.accuracy >= floor - 1e-9]
    if not able:
        return Choice(most_accurate(points), False)
    return Choice(max(able, key=lambda p: (p.tpf, p.accuracy)), True)
