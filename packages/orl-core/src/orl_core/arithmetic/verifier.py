"""Verifiers of the arithmetic task. A verifier that reads only the final number is gamed by training on its verdict;
`verify` therefore reads the whole derivation."""

import re

from orl_core.arithmetic.problem import load_reference
from orl_core.arithmetic.text import solution_choices

_FINAL = re.compile(r"(?:Answer:|answer is) (\d+)\s*$")


def verify(prompt: str, response: str, reference: str) -> bool:
    """True if every line of the response is an accepted wording of its step, in order, nothing missing or added."""
    expected = solution_choices(*load_reference(reference))
    lines = response.strip().split("\n")
    return len(lines) == len(expected) and all(line in wordings for line, wordings in zip(lines, expected, strict=True))


def verify_final(prompt: str, response: str, reference: str) -> bool:
    """True if the response ends with the right number, however it got there."""
    chain, *_ = load_reference(reference)
    match = _FINAL.search(response.strip())
    return match is not None and int(match.group(1)) == chain.values[-1]


def wording_keys(response: str, reference: str) -> tuple[int, ...] | None:
    """Which wording each line of a verified response chose: the index into `solution_choices`; None if not verified.

    Measures diversity: the entropy of these choices over many responses.
    """
    expected = solution_choices(*load_reference(reference))
    lines = response.strip().split("\n")
    if len(lines) != len(expected) or any(line not in wordings for line, wordings in zip(lines, expected, strict=True)):
        return None
    return tuple(wordings.index(line) for line, wordings in zip(lines, expected, strict=True))
