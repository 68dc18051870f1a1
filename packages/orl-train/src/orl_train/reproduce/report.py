"""The report: everything as JSON, the tables as Markdown, the frontier as a picture."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from orl_core.arithmetic import problems
from orl_train import checkpoint
from orl_train.config import to_dict
from orl_train.reproduce.arms import METHOD, ORL, SECOND, Job, Say
from orl_train.reproduce.config import ReproduceConfig
from orl_train.reproduce.files import replacing, write_json
from orl_train.reproduce.markdown import markdown
from orl_train.reproduce.plot import PlotError, draw_frontier
from orl_train.reproduce.statistics import accuracy_difference_interval, ratio_interval, tpf_interval, wilson
from orl_train.reproduce.study import FamilyStudy
from orl_train.reproduce.sweep import Measurement
from orl_train.reproduce.verdicts import compare, judge

_PACKAGES = ("orl-core", "orl-train", "dlmrt", "torch", "transformers", "accelerate", "tokenizers")


def build_report(config: ReproduceConfig, studies: Mapping[str, FamilyStudy], command: str) -> dict[str, Any]:
    """The report as plain values. command: the one that made it."""
    return {
        "command": command,
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {"platform": f"{platform.system()} {platform.machine()}", "cpus": os.cpu_count()},
        "settings": to_dict(config),
        "distinct_test_problems": _distinct("test", config.test_problems),
        "distinct_dev_problems": _distinct("dev", config.dev_problems),
        "families": {family: family_report(study) for family, study in studies.items()},
    }


def family_report(study: FamilyStudy) -> dict[str, Any]:
    """One family: its arms, the headline, the ablations."""
    best = study.best_of_base()
    return {
        "start": study.settings.start,
        "recipe": to_dict(study.recipe) | {"start": study.settings.start},
        "second": study.second,
        "best_of_base": best.summary() if best else None,
        "floor": study.floor(),
        "arms": {job.name: _arm(study, job) for job in study.jobs},
        "headline": _headline(study, ORL if study.second is None else SECOND),
        "first_stage": None if study.second is None else _headline(study, ORL),
        "ablations": _ablations(study),
    }


def _arm(study: FamilyStudy, job: Job) -> dict[str, Any]:
    record = checkpoint.read_json(job.folder / "arm.json") if (job.folder / "arm.json").is_file() else {}
    choice = study.choice(job, job.arm.residual)
    dev = {"as_trained": study.dev(job, job.arm.residual)}
    if False in study.residuals(job) and job.arm.residual:
        dev["no_residual"] = study.dev(job, False)
    files = (job.folder / "measurements").glob("*.json")
    return {
        "arm": job.arm.name,
        "title": job.arm.title,
        "seed": job.seed,
        "updates": record.get("updates", 0),
        "train_minutes": record.get("minutes", 0.0),
        "measure_minutes": sum(checkpoint.read_json(path)["seconds"] for path in files) / 60,
        "stopped": record.get("stopped"),
        "reached": choice.reached if choice else None,
        "dev_chosen": choice.point.summary() if choice else None,
        "dev": {name: [point.summary() for point in points] for name, points in dev.items()},
        "after_choice": {role: _with_intervals(study.result(job, role)) for role in study.wanted(job)},
    }


def _with_intervals(point: Measurement | None) -> dict[str, Any] | None:
    if point is None:
        return None
    return point.summary() | {
        "accuracy_interval": wilson(sum(point.right), point.n),
        "final_accuracy_interval": wilson(sum(point.final), point.n),
        "tpf_interval": tpf_interval(point),
    }


def _headline(study: FamilyStudy, arm: str) -> dict[str, Any] | None:
    """TPF of `arm` over that of the base on test, each where dev chose; None before there is one of both."""
    base, best = study.result(study.base, "chosen"), study.result(study.base, "best")
    seeds: list[dict[str, Any]] = []
    for job in study.jobs:
        ours = study.result(job, "chosen") if job.arm.name == arm else None
        if ours is None or base is None or best is None:
            continue
        choice = study.choice(job, True)
        seeds.append(
            {
                "seed": job.seed,
                "ratio": ours.tpf / base.tpf,
                "ratio_interval": ratio_interval(ours, base),
                "reached_on_dev": bool(choice and choice.reached),
                "accuracy_less_best_of_base": ours.accuracy - best.accuracy,
                "accuracy_interval": accuracy_difference_interval(ours, best),
                "held_on_test": ours.accuracy >= best.accuracy - study.config.margin / 100 - 1e-9,
            }
        )
    if not seeds:
        return None
    ratios = [row["ratio"] for row in seeds]
    return {"seeds": seeds, "mean": sum(ratios) / len(ratios), "low": min(ratios), "high": max(ratios)}


def _ablations(study: FamilyStudy) -> dict[str, Any]:
    """Full ORL beside each ablation and control of the same seed, on test."""
    full, full_choice = study.result(study.orl, "chosen"), study.choice(study.orl, True)
    rows: dict[str, Any] = {}
    if full is None or full_choice is None:
        return rows
    for job in study.jobs:
        choice = study.choice(job, job.arm.residual)
        chosen, same = study.result(job, "chosen"), study.result(job, "same")
        if job.arm.name in METHOD or choice is None or chosen is None or same is None:
            continue
        comparison = compare(full, chosen, same, full_reached=full_choice.reached, reached=choice.reached)
        rows[job.arm.name] = asdict(comparison) | {"verdict": judge(job.arm.name, comparison)}
    return rows


def write_report(report: dict[str, Any], out: Path, say: Say) -> list[Path]:
    """Writes report.json, frontier.png if matplotlib is there, and report.md; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "report.json"]
    write_json(paths[0], report)
    image: str | None = None
    try:
        draw_frontier(report, out / "frontier.png")
        image = "frontier.png"
        paths.append(out / image)
    except PlotError as error:
        say(f"no plot: {error}")
    text = out / "report.md"
    with replacing(text) as temporary:
        temporary.write_text(markdown(report, image))
    return [*paths, text]


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _distinct(split: Any, count: int) -> int:
    """How many of the problems differ in start or operations, whatever their words."""
    seen = set()
    for problem in problems(split, count):
        reference = json.loads(problem.reference)
        seen.add((reference["start"], *((operation, amount) for operation, amount, _ in reference["steps"])))
    return len(seen)
