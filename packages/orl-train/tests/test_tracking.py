"""Metrics reach accelerate's trackers under their own names, once an update."""

import pytest
from accelerate.state import AcceleratorState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from orl_core.errors import ConfigError
from orl_train import tracking
from orl_train.pretrain import pretrain
from orl_train.tracking import tracker_options


def test_tensorboard_gets_every_metric_of_every_update(quick_start, tiny_run, tmp_path):
    reported = []
    pretrain(tiny_run(steps=3), tmp_path / "run", report=reported.append, tracker="tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "tracking" / "orl-train")).Reload()
    for name in ("loss", "gradient_norm", "lr", "seconds"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in reported]
    settings = "".join(path.read_text() for path in (tmp_path / "run" / "tracking").rglob("hparams.yml"))
    assert "model.layers" in settings
    assert "steps: 3" in settings


def test_no_tracker_writes_nothing(quick_start, tiny_run, tmp_path):
    pretrain(tiny_run(steps=1), tmp_path / "run")
    assert not (tmp_path / "run" / "tracking").exists()


def test_auto_is_tensorboard_where_it_is_installed(tmp_path, monkeypatch):
    assert tracker_options("auto", tmp_path)["log_with"] == "tensorboard"
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: [])
    assert tracker_options("auto", tmp_path) == {}
    with pytest.raises(ConfigError, match=r"install orl-train\[tensorboard\]"):
        tracker_options("tensorboard", tmp_path)


def test_an_unknown_tracker_is_refused_with_the_choices(quick_start, tiny_run, tmp_path):
    with pytest.raises(ConfigError, match=r"tracker is 'paper'; it must be auto, none, .*tensorboard"):
        pretrain(tiny_run(steps=1), tmp_path / "run", tracker="paper")


@pytest.fixture(autouse=True)
def fresh_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
