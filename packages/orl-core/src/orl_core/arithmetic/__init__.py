"""The arithmetic word-problem task shared by trainer and evaluation: seeded problems, their wordings, a verifier."""

from orl_core.arithmetic.generator import draw_problem, problems
from orl_core.arithmetic.problem import SPLITS, Chain, Problem, Split, Step
from orl_core.arithmetic.verifier import verify, verify_final, wording_keys

__all__ = [
    "SPLITS",
    "Chain",
    "Problem",
    "Split",
    "Step",
    "draw_problem",
    "problems",
    "verify",
    "verify_final",
    "wording_keys",
]
