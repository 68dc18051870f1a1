"""Trains and measures what is not finished yet, then writes the report of all that is there."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orl_core.arithmetic import verify
from orl_core.errors import ConfigError
from orl_core.noise import Family
from orl_core.protocols import Verifier
from orl_train.reproduce.arms import ARMS, Job, Say, finished, held, train
from orl_train.reproduce.config import FAMILIES, ReproduceConfig
from orl_train.reproduce.report import build_report, write_report
from orl_train.reproduce.study import FamilyStudy, Wanted


def reproduce(
    config: ReproduceConfig,
    out: Path,
    *,
    families: Sequence[Family] = (),
    arms: Sequence[str] = (),
    verifier: Verifier = verify,
    say: Say = print,
    command: str = "",
) -> dict[str, Any]:
    """Runs the selected arms (default: all) of the selected families (default: both) and returns the report.

    What is finished is not run again, and jobs that another process holds are left to it. The report covers everything
    in `out`, selected or not. verifier: decides what ORL learns from and what counts as accurate.
    Raises ConfigError before any work for an unknown family or arm, a missing start model, or results in `out` that
    other settings made.
    """
    families, arms = _known("family", families, FAMILIES), _known("arm", arms, tuple(ARMS))
    began = time.perf_counter()
    selected = [FamilyStudy(config, family, out, verifier) for family in families]
    work = [(study, job) for study in selected for job in study.jobs if job.arm.name in arms]
    for study, job in work:
        finished(job, study.run_config(job))

    def tell(study: FamilyStudy, job: Job) -> Say:
        return lambda text: say(f"[{(time.perf_counter() - began) / 60:6.1f} min] {study.family}/{job.name}: {text}")

    for study, job in work:
        with held(job.folder) as mine:
            if mine:
                _train_and_sweep(study, job, tell(study, job))
            else:
                tell(study, job)("another process is at work on it")
    for study, job in work:
        with held(job.folder) as mine:
            if mine:
                _measure_choices(study, job, tell(study, job))
    report = build_report(config, _present(config, out, verifier, selected), command)
    for path in write_report(report, out, say):
        say(f"wrote {path}")
    return report


def _known(what: str, names: Sequence[Any], allowed: tuple[Any, ...]) -> tuple[Any, ...]:
    for name in names:
        if name not in allowed:
            raise ConfigError(f"unknown {what} {name!r}; there are {', '.join(allowed)}")
    return tuple(names) or allowed


def _present(
    config: ReproduceConfig, out: Path, verifier: Verifier, selected: list[FamilyStudy]
) -> dict[str, FamilyStudy]:
    """The studies that the report covers: those selected, and another family that an earlier command measured."""
    studies = {study.family: study for study in selected}
    for family in FAMILIES:
        if family not in studies and (out / family).is_dir():
            studies[family] = FamilyStudy(config, family, out, verifier)
    return {family: studies[family] for family in FAMILIES if family in studies}


def _train_and_sweep(study: FamilyStudy, job: Job, say: Say) -> None:
    config, first = study.run_config(job), study.first_stage(job)
    if first is not None and not (first.folder / "arm.json").is_file():
        say(f"waits for {first.name}; run the command again when it is trained")
        return
    if job is not study.base and finished(job, config) is None:
        say(f"training, {config.updates} updates")
        train(job, config, study.verifier, say)
    for residual in study.residuals(job):
        _measure(study.sweep(job, residual), say)
    study.release()


def _measure_choices(study: FamilyStudy, job: Job, say: Say) -> None:
    wanted = study.wanted(job)
    if any(value is None for value in wanted.values()):
        say("waits for the dev measurements of base or ORL; run the command again when they are there")
    _measure([value for value in wanted.values() if value is not None], say)
    study.release()


def _measure(wanted: list[Wanted], say: Say) -> None:
    for number, (model, setting) in enumerate(wanted, 1):
        if model.find(setting) is not None:
            continue
        made = model.measure(setting)
        context = "" if setting.residual else ", no residual"
        say(
            f"{setting.split} {number}/{len(wanted)}, {model.name} at {setting.at}{context}: accuracy "
            f"{made.accuracy:.1%}, TPF {made.tpf:.2f} ({made.seconds:.0f} s)"
        )
