"""The picture, and what is said without matplotlib."""

import sys

import pytest

from orl_train.reproduce.plot import PlotError, draw_frontier, frontier


def report(point):
    points = [point(threshold=t, tpf=tpf, accuracy=a).summary() for t, tpf, a in [(0.5, 4.0, 0.9), (0.9, 2.0, 0.99)]]
    arm = {"arm": "base", "dev": {"as_trained": points, "no_residual": []}, "dev_chosen": points[1], "reached": True}
    return {"families": {"uniform": {"floor": 0.985, "arms": {"base": arm}}}}


def test_the_frontier_is_drawn(point, tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs orl-train[plot]")
    draw_frontier(report(point), tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["frontier.png"]


def test_the_line_leaves_out_what_another_point_beats_in_both():
    points = [(4.0, 90.0), (2.0, 99.0), (3.0, 95.0), (3.5, 85.0), (2.0, 98.0)]
    assert frontier(points) == [(2.0, 99.0), (3.0, 95.0), (4.0, 90.0)]


def test_without_matplotlib_the_error_says_what_to_install(point, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(PlotError, match=r"install orl-train\[plot\]"):
        draw_frontier(report(point), tmp_path / "frontier.png")
    assert list(tmp_path.iterdir()) == []
