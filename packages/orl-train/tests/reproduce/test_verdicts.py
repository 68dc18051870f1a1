"""Our sign beside the published one."""

import pytest

from orl_train.reproduce.verdicts import compare, judge


def comparison(point, *, ratio=1, right=None, full_reached=True, reached=True):
    full = point(tokens=[30 * ratio, 40 * ratio, 50 * ratio, 60 * ratio], right=[1, 1, 1, 1])
    return compare(full, point(), point(right=right or [1, 1, 1, 1]), full_reached=full_reached, reached=reached)


@pytest.mark.parametrize(("ratio", "verdict"), [(2, "same sign"), (1, "not resolved"), (0.5, "opposite sign")])
@pytest.mark.parametrize("arm", ["no-aec", "no-residual", "off-policy"])
def test_tpf_decides_at_the_floor(point, arm, ratio, verdict):
    assert judge(arm, comparison(point, ratio=ratio, right=[0, 0, 0, 0])) == verdict


def test_an_arm_below_the_floor_has_no_tpf(point):
    assert judge("no-aec", comparison(point, ratio=0.5, reached=False)) == "same sign"
    assert judge("no-aec", comparison(point, ratio=2, full_reached=False)) == "opposite sign"
    assert judge("no-aec", comparison(point, ratio=2, full_reached=False, reached=False)) == "not resolved"


def test_accuracy_decides_for_the_reverse_kl(point):
    assert judge("no-kl", comparison(point, ratio=0.5, right=[0, 0, 0, 0])) == "same sign"
    assert judge("no-kl", comparison(point, ratio=2)) == "not resolved"


def test_controls_have_no_published_sign(point):
    assert judge("rsft", comparison(point)) == ""
