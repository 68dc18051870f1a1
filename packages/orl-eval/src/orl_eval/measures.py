"""Measures over scored answers: accuracy with its Wilson interval, tokens per forward, tokens per second."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

Z_95 = 1.959963984540054  # 97.5% quantile of the standard normal distribution


@dataclass(frozen=True, slots=True)
class Score:
    """One answered and verified problem.

    tokens    tokens of the response up to and including its end token
    forwards  denoising forwards
    commits   cache commits, one a block
    seconds   wall time from prompt to text
    """

    index: int
    seed: int
    prompt: str
    reference: str
    response: str
    finish_reason: str
    correct: bool
    final_correct: bool
    tokens: int
    forwards: int
    commits: int
    seconds: float

    @property
    def tpf(self) -> float:
        return self.tokens / max(1, self.forwards)

    @property
    def tpf_commit(self) -> float:
        return self.tokens / max(1, self.forwards + self.commits)


@dataclass(frozen=True, slots=True)
class Summary:
    """Aggregates of a run. TPF counts denoising forwards; `_commit` counts one more forward a block.

    accuracy            share of answers whose whole derivation holds, with its 95% Wilson interval
    final_accuracy      share of answers whose last number is right, likewise
    tpf                 all tokens / all forwards: the headline, what a stream of such requests gets per forward
    tpf_mean            mean of the responses' own TPF: a few short answers can move it far
    tokens_per_second   all tokens / all wall seconds
    truncated           answers that ended at the token limit
    """

    n: int
    accuracy: float
    accuracy_interval: tuple[float, float]
    final_accuracy: float
    final_accuracy_interval: tuple[float, float]
    tpf: float
    tpf_commit: float
    tpf_mean: float
    tpf_commit_mean: float
    tokens: int
    forwards: int
    commits: int
    seconds: float
    tokens_per_second: float
    truncated: int


def wilson_interval(successes: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a binomial proportion (Wilson 1927): all p with |successes/n - p| <= z sqrt(p (1 - p) / n)."""
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"successes is {successes} of n = {n}; they must satisfy 0 <= successes <= n and n >= 1")
    share, shrink = successes / n, 1 + z * z / n
    centre = (share + z * z / (2 * n)) / shrink
    half = z * sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / shrink
    # at 0 and n successes the bound is exactly 0 and 1, which rounding would miss
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return low, high


def summarize(scores: Sequence[Score]) -> Summary:
    """Aggregates of at least one score; raises ValueError on none."""
    n = len(scores)
    correct, final = sum(s.correct for s in scores), sum(s.final_correct for s in scores)
    accuracy_interval, final_interval = wilson_interval(correct, n), wilson_interval(final, n)
    tokens, forwards = sum(s.tokens for s in scores), sum(s.forwards for s in scores)
    commits, seconds = sum(s.commits for s in scores), sum(s.seconds for s in scores)
    return Summary(
        n=n,
        accuracy=correct / n,
        accuracy_interval=accuracy_interval,
        final_accuracy=final / n,
        final_accuracy_interval=final_interval,
        tpf=tokens / max(1, forwards),
        tpf_commit=tokens / max(1, forwards + commits),
        tpf_mean=sum(s.tpf for s in scores) / n,
        tpf_commit_mean=sum(s.tpf_commit for s in scores) / n,
        tokens=tokens,
        forwards=forwards,
        commits=commits,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds > 0 else 0.0,
        truncated=sum(s.finish_reason == "length" for s in scores),
    )
