"""What dev chooses."""

from orl_train.orl.config import RolloutSettings
from orl_train.reproduce.sweep import Choice, Thresholds, choose, most_accurate, thresholds_of


def test_the_fastest_point_at_the_floor_is_chosen(point):
    slow = point(threshold=0.9, accuracy=0.99, tpf=2.0)
    fast = point(threshold=0.7, accuracy=0.985, tpf=5.0)
    wrong = point(threshold=0.5, accuracy=0.98, tpf=9.0)
    assert most_accurate([wrong, fast, slow]) is slow
    assert choose([wrong, fast, slow], 0.985) == Choice(fast, True)
    assert choose([wrong, fast, slow], 0.99 - 0.005) == Choice(fast, True)


def test_below_the_floor_the_most_accurate_point_stands_in(point):
    slow, fast = point(accuracy=0.9, tpf=2.0), point(accuracy=0.9, tpf=3.0)
    assert choose([slow, fast], 0.95) == Choice(fast, False)


def test_thresholds_of_the_masked_family_leave_the_stop_rule_alone():
    settings = RolloutSettings(confidence_threshold=0.02, stability_threshold=0)
    at = Thresholds(0.9).rollout(settings)
    assert (at.low, at.high, at.confidence_threshold, at.stability_threshold) == (0.9, 0.9, 0.02, 0)
    at = Thresholds(0.5, 0.1, 1).rollout(settings)
    assert (at.low, at.high, at.confidence_threshold, at.stability_threshold) == (0.5, 0.5, 0.1, 1)


def test_thresholds_survive_a_summary_and_are_short(point):
    made = point(threshold=1.0, confidence_threshold=0.02, stability_threshold=0)
    assert thresholds_of(made.summary()) == made.at == Thresholds(1.0, 0.02, 0)
    assert [str(made.at), str(Thresholds(0.995))] == ["1, 0.02, 0", "0.995"]
