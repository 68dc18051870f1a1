from collections.abc import Callable

import pytest

from orl_core.arithmetic import problems
from orl_eval.endpoints import Answer


class FakeAnswerer:
    """Answers from a function of (index of the problem, its prompt); eight tokens in two forwards and one block."""

    model = "fake"

    def __init__(self, respond: Callable[[int, str], str]) -> None:
        self.respond = respond
        self.seeds: list[int] = []

    def answer(self, prompt: str, seed: int) -> Answer:
        self.seeds.append(seed)
        text = self.respond(len(self.seeds) - 1, prompt)
        return Answer(text, finish_reason="stop", tokens=8, forwards=2, commits=1)

    def settings(self):
        return {"decoder": "fake"}

    def environment(self):
        return {"device": "none"}


@pytest.fixture
def fake() -> Callable[[Callable[[int, str], str]], FakeAnswerer]:
    return FakeAnswerer


@pytest.fixture
def solutions() -> dict[str, str]:
    """A right answer to each of the first test problems of seed 0."""
    return {problem.prompt: problem.solution for problem in problems("test", 20, 0)}
