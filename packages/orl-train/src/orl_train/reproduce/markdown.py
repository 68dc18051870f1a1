"""The report's tables in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

from orl_train.reproduce.sweep import thresholds_of
from orl_train.reproduce.verdicts import CLAIMS

NOTHING = "-"
THRESHOLDS = {
    "uniform": "Thresholds are the entropy bound (nats), the mean entropy (nats) below which a block may stop, and the "
    "steps over which its most probable tokens must not have changed by then.",
    "masked": "",
}


def markdown(report: dict[str, Any], image: str | None) -> str:
    """The tables of a report; image: the frontier's path, if it was drawn."""
    settings = report["settings"]
    parts = [
        "## How it was made",
        f"```bash\n{report['command']}\n```" if report["command"] else "",
        f"ORL with seeds {_listed(settings['headline_seeds'])}, ablations and controls with seed "
        f"{settings['ablation_seed']}. Thresholds chosen on {settings['dev_problems']} dev problems "
        f"({report['distinct_dev_problems']} distinct), measured on {settings['test_problems']} test problems "
        f"({report['distinct_test_problems']} distinct). "
        f"{_listed(f'{name} {number}' for name, number in report['versions'].items())}; "
        f"{report['machine']['platform']}, {report['machine']['cpus']} CPUs.",
    ]
    if image is not None:
        parts += ["## Frontier", f"![Accuracy over tokens per forward on dev, for every threshold]({image})"]
    for family, data in report["families"].items():
        parts += family_tables(family, data)
    return "\n\n".join(part for part in parts if part) + "\n"


def family_tables(family: str, data: dict[str, Any]) -> list[str]:
    """Headline, arms, ablations, 2x2, diversity and sweeps of one family."""
    title = family.capitalize()
    if data["floor"] is None:
        return [f"## {title} family", "The base is not measured yet."]
    best = data["best_of_base"]
    return [
        f"## {title} family",
        f"Start model `{data['start']}`. On dev the base's best accuracy is {_percent(best['accuracy'])} (at "
        f"{thresholds_of(best)}), so the floor is {_percent(data['floor'])}.",
        THRESHOLDS[family],
        *_headline(data["headline"], "Headline"),
        *_headline(data["first_stage"], "The first stage alone, whose schedule the ablations and controls share"),
        *_arms(data),
        *_ablations(data),
        *_two_by_two(data),
        *_diversity(data),
        *_sweeps(data),
    ]


def _headline(headline: dict[str, Any] | None, title: str) -> list[str]:
    if headline is None:
        return []
    rows = [
        [
            row["seed"],
            f"{row['ratio']:.2f}x",
            _interval(row["ratio_interval"], "{:.2f}"),
            f"{100 * row['accuracy_less_best_of_base']:+.1f}",
            _interval(row["accuracy_interval"], "{:+.1f}", 100),
            "yes" if row["reached_on_dev"] else "no",
            "yes" if row["held_on_test"] else "no",
        ]
        for row in headline["seeds"]
    ]
    head = ["seed", "TPF over base", "95%", "accuracy less base's best, points", "95%", "floor on dev", "floor on test"]
    return [
        f"### {title}",
        f"**{headline['mean']:.2f}x** the base's tokens per forward, mean over {len(rows)} seed"
        f"{'s' * (len(rows) != 1)} ({headline['low']:.2f}x to {headline['high']:.2f}x).",
        _table(head, rows),
    ]


def _arms(data: dict[str, Any]) -> list[str]:
    rows = []
    for name, arm in data["arms"].items():
        test = arm["after_choice"]["chosen"]
        rows.append([f"{arm['title']} (`{name}`)", *_point(test), *_cost(arm)])
        if arm["after_choice"].get("best"):
            rows.append(["base where it is most accurate", *_point(arm["after_choice"]["best"]), NOTHING, NOTHING])
    notes = [f"`{name}` stopped early: {arm['stopped']}" for name, arm in data["arms"].items() if arm["stopped"]]
    unreached = [f"`{name}`" for name, arm in data["arms"].items() if arm["reached"] is False]
    if unreached:
        notes.append(f"No threshold keeps {_listed(unreached)} at the floor on dev; the most accurate one stands in.")
    head = ["model", "threshold", "accuracy", "final number right", "TPF", "TPF with commits", "updates", "minutes"]
    return ["### All arms, on test where dev chose", _table(head, rows), *notes]


def _cost(arm: dict[str, Any]) -> list[str]:
    return [f"{arm['updates']:g}" if arm["updates"] else NOTHING, f"{arm['train_minutes']:.1f}"]


def _point(point: dict[str, Any] | None) -> list[str]:
    if point is None:
        return ["not measured", *[NOTHING] * 4]
    return [
        str(thresholds_of(point)),
        f"{_percent(point['accuracy'])} {_interval(point['accuracy_interval'], '{:.1f}', 100)}",
        _percent(point["final_accuracy"]),
        f"{point['tpf']:.2f} {_interval(point['tpf_interval'], '{:.2f}')}",
        f"{point['tpf_commit']:.2f}",
    ]


def _ablations(data: dict[str, Any]) -> list[str]:
    rows = []
    for name, row in data["ablations"].items():
        claim = CLAIMS.get(name)
        rows.append(
            [
                f"`{name}`",
                f"{row['ratio']:.2f}x {_interval(row['ratio_interval'], '{:.2f}')}" + (" *" * (not row["reached"])),
                f"{100 * row['difference']:+.1f} {_interval(row['difference_interval'], '{:+.1f}', 100)}",
                claim.text if claim else NOTHING,
                row["verdict"] or NOTHING,
            ]
        )
    if not rows:
        return []
    head = ["against", "TPF of ORL over it", "accuracy of ORL less it at ORL's threshold, points", "published", "ours"]
    note = "\\* No threshold keeps it at the floor; its TPF is that where it is most accurate."
    starred = any(not row["reached"] for row in data["ablations"].values())
    return ["### Ablations and controls, same seed and budget, on test", _table(head, rows), note * starred]


def _two_by_two(data: dict[str, Any]) -> list[str]:
    rows = []
    for arm in data["arms"].values():
        roles = arm["after_choice"]
        if "no-residual" in roles:
            cells = [_brief(roles[role]) for role in ("chosen", "no-residual")]
            rows.append([arm["title"], *cells])
    head = ["", "with residual context", "decoded without it"]
    return ["### Base and ORL with and without residual context (accuracy / TPF, on test)", _table(head, rows)]


def _brief(point: dict[str, Any] | None) -> str:
    if point is None:
        return "not measured"
    return f"{_percent(point['accuracy'])} / {point['tpf']:.2f} at {thresholds_of(point)}"


def _diversity(data: dict[str, Any]) -> list[str]:
    rows = []
    for name, arm in data["arms"].items():
        greedy, sampled = arm["after_choice"]["chosen"], arm["after_choice"].get("sampled")
        rows.append([f"`{name}`", *(NOTHING if p is None else f"{p['diversity']:.2f}" for p in (greedy, sampled))])
    return [
        "### Diversity of answers",
        "Entropy (nats) of the wordings that the step lines of verified answers choose.",
        _table(["model", "greedy, on test", "sampled as in rollouts, on dev"], rows),
    ]


def _sweeps(data: dict[str, Any]) -> list[str]:
    arms = {name: arm["dev"]["as_trained"] for name, arm in data["arms"].items() if arm["dev"]["as_trained"]}
    last = {name: points[-1]["model"] for name, points in arms.items()}
    at = {n: {thresholds_of(p): p for p in points if p["model"] == last[n]} for n, points in arms.items()}
    grid = list(dict.fromkeys(thresholds for points in at.values() for thresholds in points))
    rows = [
        [t, *(f"{_percent(p[t]['accuracy'])} / {p[t]['tpf']:.2f}" if t in p else NOTHING for p in at.values())]
        for t in grid
    ]
    return ["### Every threshold on dev (accuracy / TPF)", _table(["threshold", *(f"`{n}`" for n in at)], rows)]


def _table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _interval(pair: Sequence[float], form: str, factor: float = 1.0) -> str:
    return f"[{form.format(factor * pair[0])}, {form.format(factor * pair[1])}]"


def _listed(items: Iterable[Any]) -> str:
    return ", ".join(map(str, items))
