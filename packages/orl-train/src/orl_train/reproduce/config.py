"""Settings of a reproduction, and what its two families start from."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orl_core.errors import ConfigError, require_at_least, require_range
from orl_core.noise import Family
from orl_train.config import load_config
from orl_train.model_folder import model_folder

FAMILIES: tuple[Family, ...] = ("uniform", "masked")


@dataclass(frozen=True, slots=True)
class FamilySettings:
    """start: folder of the start model, or "embedded:base" and the like. recipe: TOML file of the OrlConfig that every
    arm of the family follows, relative to the file that names it. second: the same of a second stage, by which the ORL
    models of all seeds are trained on for the headline; None for none. grid: thresholds at which models are measured:
    the entropy bound in nats (uniform) or the confidence threshold (masked). confidence_thresholds,
    stability_thresholds: in the uniform family each bound is measured with every pair of them as the stop rule; empty
    means that of the recipe's rollouts."""

    start: str
    recipe: str
    grid: tuple[float, ...]
    second: str | None = None
    confidence_thresholds: tuple[float, ...] = ()
    stability_thresholds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReproduceConfig:
    """A reproduction.

    headline_seeds: seeds of the ORL runs. ablation_seed: the one of them that ablations and controls share.
    dev_problems: choose thresholds and checkpoints. test_problems: are measured once the choice is made.
    margin: points of accuracy below the base's best that a model may lose.
    candidates: newest saved models of an arm among which dev chooses; 1 takes the final one.
    batch: answers at once.
    """

    uniform: FamilySettings
    masked: FamilySettings
    headline_seeds: tuple[int, ...] = (0, 1, 2)
    ablation_seed: int = 0
    dev_problems: int = 200
    test_problems: int = 1200
    margin: float = 0.5
    candidates: int = 1
    batch: int = 64

    def __post_init__(self) -> None:
        for name in ("dev_problems", "test_problems", "candidates", "batch"):
            require_at_least(name, getattr(self, name), 1)
        require_range("margin", self.margin, 0.0, 100.0)
        if self.ablation_seed not in self.headline_seeds:
            raise ConfigError(
                f"ablation_seed is {self.ablation_seed}; it must be one of headline_seeds, {list(self.headline_seeds)}"
            )
        if len(set(self.headline_seeds)) < len(self.headline_seeds):
            raise ConfigError(f"headline_seeds are {list(self.headline_seeds)}; each may occur once")
        for family in FAMILIES:
            self._check_thresholds(family)

    def _check_thresholds(self, family: Family) -> None:
        settings = self.family(family)
        stop_rule = ("confidence_thresholds", "stability_thresholds")
        if not settings.grid:
            raise ConfigError(f"{family}: grid is empty; give at least one threshold, such as [0.1, 1.0]")
        for name in ("grid", *stop_rule):
            values = list(getattr(settings, name))
            if values != sorted(set(values)):
                raise ConfigError(f"{family}: {name} is {values}; it must ascend, each threshold once")
            if values and (values[0] < 0 or (values[0] == 0 and name != "stability_thresholds")):
                at_least = "at least 0" if name == "stability_thresholds" else "greater than 0"
                raise ConfigError(f"{family}: {name} is {values}; every threshold must be {at_least}")
        if family == "masked" and settings.grid[-1] > 1:
            raise ConfigError(f"masked: grid is {list(settings.grid)}; every threshold must lie in (0, 1]")
        for name in stop_rule:
            if family == "masked" and getattr(settings, name):
                raise ConfigError(f"masked: {name} is set; only the uniform family has such a stop rule")

    def family(self, family: Family) -> FamilySettings:
        return self.uniform if family == "uniform" else self.masked


def load_study(path: Path, overrides: dict[str, Any] | None = None) -> ReproduceConfig:
    """Reads a reproduction's TOML file; the recipes it names become paths from here. Raises ConfigError."""
    config = load_config(ReproduceConfig, path, overrides)
    located: dict[str, Any] = {}
    for family in FAMILIES:
        settings = config.family(family)
        second = None if settings.second is None else str(path.parent / settings.second)
        located[family] = replace(settings, recipe=str(path.parent / settings.recipe), second=second)
    return replace(config, **located)


def start_folder(settings: FamilySettings, family: Family) -> Path:
    """Folder of a family's start model. Raises ConfigError if there is none, or one of the other family."""
    folder = model_folder(settings.start)
    found = json.loads((folder / "config.json").read_text()).get("state_family")
    if found != family:
        raise ConfigError(f"{family}: the start model {settings.start!r} has state_family {found!r}")
    return folder
