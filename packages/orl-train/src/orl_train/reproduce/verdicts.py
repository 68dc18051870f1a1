"""The published ablation beside ours: is the sign of each difference the same?"""

from dataclasses import dataclass
from typing import Literal

from orl_train.reproduce.statistics import Interval, accuracy_difference_interval, ratio_interval
from orl_train.reproduce.sweep import Measurement

Verdict = Literal["same sign", "opposite sign", "not resolved", ""]


@dataclass(frozen=True, slots=True)
class Claim:
    """What is published of an ablation: that the full method is better in `measure`."""

    measure: Literal["tpf", "accuracy"]
    text: str


# QwenDLM trained on GSM8K, measured on GSM8K (accuracy in % / TPF); off-policy: the sign only
CLAIMS = {
    "no-aec": Claim("tpf", "AEC raises TPF (4.48 -> 6.25)"),
    "no-kl": Claim("accuracy", "without reverse KL accuracy falls (94.5 -> 87.8)"),
    "no-residual": Claim("tpf", "without residual TPF falls (6.25 -> 3.68)"),
    "off-policy": Claim("tpf", "off-policy is worse"),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Full ORL against another arm on the same test problems.

    ratio: TPF of ORL / TPF of the arm, each at its own chosen threshold. difference: accuracy of ORL less that of the
    arm, both at ORL's threshold. reached: whether a threshold keeps the arm at the floor on dev.
    """

    ratio: float
    ratio_interval: Interval
    difference: float
    difference_interval: Interval
    full_reached: bool
    reached: bool


def compare(
    full: Measurement, chosen: Measurement, same: Measurement, *, full_reached: bool, reached: bool
) -> Comparison:
    """chosen: the arm at its own threshold. same: the arm at ORL's threshold."""
    return Comparison(
        ratio=full.tpf / chosen.tpf,
        ratio_interval=ratio_interval(full, chosen),
        difference=full.accuracy - same.accuracy,
        difference_interval=accuracy_difference_interval(full, same),
        full_reached=full_reached,
        reached=reached,
    )


def judge(arm: str, comparison: Comparison) -> Verdict:
    """The sign of our difference against the published one; "" where none is published.

    A TPF counts only at the floor: an arm that no threshold keeps there has none, and is worse than one that has.
    """
    claim = CLAIMS.get(arm)
    if claim is None:
        return ""
    if claim.measure == "accuracy":
        low, high = comparison.difference_interval
        return _sign(low, high, 0.0)
    if comparison.full_reached != comparison.reached:
        return "same sign" if comparison.full_reached else "opposite sign"
    if not comparison.reached:
        return "not resolved"
    return _sign(*comparison.ratio_interval, 1.0)


def _sign(low: float, high: float, nothing: float) -> Verdict:
    if low > nothing:
        return "same sign"
    return "opposite sign" if high < nothing else "not resolved"
