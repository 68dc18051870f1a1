"""Arithmetic word problems in several steps; made by orl_core.arithmetic, so trainer and evaluation share one task."""

from typing import cast

from orl_core.arithmetic import SPLITS, Split, problems
from orl_eval.tasks.base import Item
from orl_eval.verifiers import verify_arithmetic, verify_arithmetic_final


class Arithmetic:
    """Word problems whose answers show their steps; the strict verdict checks every step."""

    name = "arithmetic"
    splits: tuple[str, ...] = SPLITS

    def items(self, split: str, count: int, seed: int) -> list[Item]:
        return [Item(problem.prompt, problem.reference) for problem in problems(cast(Split, split), count, seed)]

    def correct(self, item: Item, response: str) -> bool:
        return verify_arithmetic(item.prompt, response, item.reference)

    def final_correct(self, item: Item, response: str) -> bool:
        return verify_arithmetic_final(item.prompt, response, item.reference)
