"""What a task is: problems and two verdicts on an answer."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Item:
    """One problem: the prompt shown to the model and the opaque reference that its verifier reads."""

    prompt: str
    reference: str


class Task(Protocol):
    """A benchmark. Pure: the same (split, count, seed) gives the same items, everywhere."""

    name: str
    splits: tuple[str, ...]

    def items(self, split: str, count: int, seed: int) -> list[Item]:
        """The first `count` problems of a split in the order that `seed` gives them."""
        ...

    def correct(self, item: Item, response: str) -> bool:
        """Strict verdict: the whole derivation holds."""
        ...

    def final_correct(self, item: Item, response: str) -> bool:
        """Lenient verdict: the last number is right, however it was reached."""
        ...
