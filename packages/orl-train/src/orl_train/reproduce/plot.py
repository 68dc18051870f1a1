"""The accuracy-TPF frontier as a picture; matplotlib comes with orl-train[plot]."""

from pathlib import Path
from typing import Any

from orl_train.errors import TrainError
from orl_train.reproduce.arms import METHOD
from orl_train.reproduce.files import replacing

SHOWN_BELOW_FLOOR = 0.15  # of accuracy; what lies lower is in the tables


class PlotError(TrainError):
    """The picture cannot be drawn."""


def draw_frontier(report: dict[str, Any], path: Path) -> None:
    """Draws a panel per family: accuracy over TPF on dev at every threshold, a line along the best of them, the floor,
    and what was chosen.

    Raises PlotError without matplotlib.
    """
    try:
        from matplotlib import colormaps  # pyright: ignore[reportMissingImports]
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyright: ignore[reportMissingImports]
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise PlotError("matplotlib is not installed; install orl-train[plot]") from error
    families = report["families"]
    figure = Figure(figsize=(7 * max(1, len(families)), 5), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (family, data) in enumerate(families.items(), 1):
        axes = figure.add_subplot(1, len(families), number)
        axes.set_prop_cycle(color=colormaps["tab20"].colors)
        draw_family(axes, data)
        for axis in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            axis("{x:g}")
        axes.set_title(f"{family} family, dev")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def draw_family(axes: Any, data: dict[str, Any]) -> None:
    """One panel."""
    for name, arm in data["arms"].items():
        main = arm["arm"] in METHOD
        for variant, points in arm["dev"].items():
            label = name + (" without residual" if variant == "no_residual" else "")
            _draw_line(axes, points, label, "-" if main and variant == "as_trained" else ":")
        if arm["dev_chosen"] and arm["reached"]:
            axes.plot(arm["dev_chosen"]["tpf"], 100 * arm["dev_chosen"]["accuracy"], "k*", markersize=9, zorder=3)
    if data["floor"] is not None:
        axes.axhline(100 * data["floor"], color="gray", linestyle="--", linewidth=1)
        axes.set_ylim(100 * max(-0.005, data["floor"] - SHOWN_BELOW_FLOOR), 100.5)
    axes.set_xscale("log")
    axes.set_xlabel("tokens per forward (log scale)")
    axes.set_ylabel("accuracy, whole derivation (%)")
    if axes.lines:
        axes.legend(fontsize=7)


def _draw_line(axes: Any, points: list[dict[str, Any]], label: str, style: str) -> None:
    if points:
        last = [(p["tpf"], 100 * p["accuracy"]) for p in points if p["model"] == points[-1]["model"]]
        best = frontier(last)
        (line,) = axes.plot(*zip(*best, strict=True), style, marker=".", label=label)
        rest = [point for point in last if point not in best]
        axes.scatter(*zip(*rest, strict=True) if rest else ((), ()), s=4, color=line.get_color(), alpha=0.4)


def frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (TPF, accuracy) that no other one beats in both, slowest first."""
    best: list[tuple[float, float]] = []
    for point in sorted(points, reverse=True):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best[::-1]
