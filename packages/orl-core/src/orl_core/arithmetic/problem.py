"""Arithmetic word problems: what a problem is, how it is drawn, and which split it belongs to.

A problem is a start number and a chain of operations on it; values stay in 0..40, amounts in 1..9. Two problems are the
same if they share start and operations, whatever names and phrases dress them; the split is a hash of just that, so no
problem of one split occurs in another.
"""

import hashlib
import json
import random
from dataclasses import dataclass
from typing import Literal

from orl_core.errors import ConfigError

Operation = Literal["add", "subtract", "multiply", "halve"]
Split = Literal["train", "dev", "test"]

SPLITS: tuple[Split, ...] = ("train", "dev", "test")
MAX_VALUE = 40
MAX_START = 20
MAX_AMOUNT = 9
MAX_STEPS = 6
_STEP_WEIGHTS = (1, 3, 4, 4, 3, 2)  # for 1..MAX_STEPS steps


@dataclass(frozen=True, slots=True)
class Step:
    """One operation. `amount` is 2 for halve; `verb` is an index into the operation's verbs (see text.py)."""

    operation: Operation
    amount: int
    verb: int

    @property
    def symbol(self) -> str:
        return {"add": "+", "subtract": "-", "multiply": "*", "halve": "/"}[self.operation]

    def apply(self, value: int) -> int:
        if self.operation == "add":
            return value + self.amount
        if self.operation == "subtract":
            return value - self.amount
        return value * self.amount if self.operation == "multiply" else value // 2


@dataclass(frozen=True, slots=True)
class Chain:
    """The mathematical content of a problem."""

    start: int
    steps: tuple[Step, ...]

    @property
    def values(self) -> list[int]:
        """The value after each step, preceded by the start."""
        values = [self.start]
        for step in self.steps:
            values.append(step.apply(values[-1]))
        return values

    @property
    def equations(self) -> list[str]:
        """'12 + 7 = 19' for every step."""
        values = self.values
        return [
            f"{a} {step.symbol} {step.amount} = {b}" for a, step, b in zip(values, self.steps, values[1:], strict=False)
        ]

    def split(self) -> Split:
        """The split this problem belongs to: 5% dev, 5% test, the rest train, by a hash of start and operations."""
        text = f"{self.start}|" + "|".join(f"{s.symbol}{s.amount}" for s in self.steps)
        bucket = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 100
        return "dev" if bucket < 5 else "test" if bucket < 10 else "train"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem as a reader sees it.

    prompt     the text of the problem
    solution   one correct derivation among many: a line per step, then the answer
    reference  JSON for the verifier: chain, names, style
    """

    prompt: str
    solution: str
    reference: str


def draw_chain(rng: random.Random, verbs: dict[Operation, int]) -> Chain:
    """A chain of 1..MAX_STEPS operations, all values in 0..MAX_VALUE; `verbs` is the number of verbs per operation."""
    start = value = rng.randint(2, MAX_START)
    steps: list[Step] = []
    for _ in range(rng.choices(range(1, MAX_STEPS + 1), _STEP_WEIGHTS)[0]):
        options: list[Operation] = []
        if value < MAX_VALUE:
            options += ["add"] * 4
        if value > 0:
            options += ["subtract"] * 4
        if 0 < value <= MAX_VALUE // 2:
            options.append("multiply")
        if value > 1 and value % 2 == 0:
            options.append("halve")
        operation = rng.choice(options)
        if operation == "add":
            amount = rng.randint(1, min(MAX_AMOUNT, MAX_VALUE - value))
        elif operation == "subtract":
            amount = rng.randint(1, min(MAX_AMOUNT, value))
        elif operation == "multiply":
            amount = rng.randint(2, min(3, MAX_VALUE // value))
        else:
            amount = 2
        step = Step(operation, amount, rng.randrange(verbs[operation]))
        steps.append(step)
        value = step.apply(value)
    return Chain(start, tuple(steps))


def dump_reference(chain: Chain, name: str, item: str, terse: bool) -> str:
    steps = [[s.operation, s.amount, s.verb] for s in chain.steps]
    return json.dumps({"start": chain.start, "steps": steps, "name": name, "item": item, "terse": terse})


def load_reference(reference: str) -> tuple[Chain, str, str, bool]:
    """Inverse of dump_reference; raises ConfigError if the text is not a reference of this task."""
    try:
        data = json.loads(reference)
        chain = Chain(data["start"], tuple(Step(*step) for step in data["steps"]))
        return chain, data["name"], data["item"], data["terse"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"not a reference of the arithmetic task: {reference[:80]!r} ({error})") from error
