"""Seeded problems of the arithmetic task."""

import random

from orl_core.arithmetic.problem import SPLITS, Problem, Split, draw_chain, dump_reference
from orl_core.arithmetic.text import ITEMS, VERB_COUNTS, draw_name, draw_prompt, solution_choices
from orl_core.errors import ConfigError

TERSE_SHARE = 0.2


def draw_problem(split: Split, seed: int, index: int) -> Problem:
    """Problem number `index` of a split: a pure function of its arguments, so that order and ranks do not matter."""
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}; there are {', '.join(SPLITS)}")
    rng = random.Random(f"arithmetic/{split}/{seed}/{index}")
    chain = draw_chain(rng, VERB_COUNTS)
    while chain.split() != split:
        chain = draw_chain(rng, VERB_COUNTS)
    terse = rng.random() < TERSE_SHARE
    name, pronoun = draw_name(rng)
    item = rng.choice(ITEMS)
    prompt = draw_prompt(rng, chain, name, pronoun, item, terse)
    solution = "\n".join(rng.choice(wordings) for wordings in solution_choices(chain, name, item, terse))
    return Problem(prompt, solution, dump_reference(chain, name, item, terse))


def problems(split: Split, count: int, seed: int = 0) -> list[Problem]:
    """The first `count` problems of a split under a seed."""
    return [draw_problem(split, seed, index) for index in range(count)]
