"""The words of the arithmetic task: how a chain is told as a problem and how its derivation may be written.

`solution_choices` lists every accepted wording of every line. Drawing a solution and verifying one both read it, so
they cannot disagree.
"""

import random

from orl_core.arithmetic.problem import Chain, Operation

MALE = [
    "Tom",
    "Ben",
    "Max",
    "Leo",
    "Sam",
    "Paul",
    "Omar",
    "Jack",
    "Noah",
    "Hugo",
    "Ivan",
    "Luis",
    "Adam",
    "Finn",
    "Karl",
    "Ravi",
]
FEMALE = [
    "Anna",
    "Mia",
    "Zoe",
    "Lena",
    "Ruth",
    "Sara",
    "Nora",
    "Emma",
    "Lucy",
    "Ines",
    "Maya",
    "Olga",
    "Vera",
    "Jane",
    "Rosa",
    "Amy",
]
ITEMS = [
    "apples",
    "books",
    "coins",
    "cards",
    "stamps",
    "marbles",
    "pencils",
    "cookies",
    "shells",
    "stickers",
    "eggs",
    "oranges",
    "tickets",
    "flowers",
    "buttons",
    "stones",
    "candies",
    "balls",
    "cups",
    "plants",
    "toys",
    "photos",
    "beads",
    "pears",
    "muffins",
    "keys",
    "letters",
    "boxes",
    "peaches",
    "nuts",
]

# (told in the third person, told as a noun phrase in the solution)
VERBS: dict[Operation, tuple[tuple[str, str], ...]] = {
    "add": (
        ("buys {n}", "Buying {n}"),
        ("finds {n}", "Finding {n}"),
        ("gets {n}", "Getting {n}"),
        ("wins {n}", "Winning {n}"),
        ("collects {n}", "Collecting {n}"),
        ("receives {n}", "Receiving {n}"),
        ("picks {n}", "Picking {n}"),
        ("makes {n}", "Making {n}"),
        ("adds {n}", "Adding {n}"),
        ("borrows {n}", "Borrowing {n}"),
    ),
    "subtract": (
        ("gives away {n}", "Giving away {n}"),
        ("loses {n}", "Losing {n}"),
        ("sells {n}", "Selling {n}"),
        ("uses {n}", "Using {n}"),
        ("throws away {n}", "Throwing away {n}"),
        ("eats {n}", "Eating {n}"),
        ("drops {n}", "Dropping {n}"),
        ("breaks {n}", "Breaking {n}"),
        ("spends {n}", "Spending {n}"),
        ("returns {n}", "Returning {n}"),
    ),
    "multiply": (
        ("gets {n} times as many", "Having {n} times as many"),
        ("multiplies them by {n}", "Multiplying by {n}"),
    ),
    "halve": (
        ("gives away half of them", "Giving away half"),
        ("loses half of them", "Losing half"),
    ),
}
VERB_COUNTS: dict[Operation, int] = {operation: len(verbs) for operation, verbs in VERBS.items()}

_PROMPT_TAILS: dict[Operation, tuple[str, ...]] = {
    "add": ("", " more"),
    "subtract": ("", "", " of them"),
    "multiply": ("",),
    "halve": ("",),
}
_LINKS = ("", "Then ", "Next ", "After that ", "Now ", "So ")
_RESULTS = (
    "{act} makes {eq}.",
    "{act} gives {eq} {item}.",
    "{act} leaves {name} with {eq}.",
    "{act} means {name} has {eq} {item}.",
    "{act}, we get {eq}.",
)
_OPENINGS = (
    "{name} starts with {n} {item}.",
    "At first {name} has {n} {item}.",
    "We begin with {n} {item}.",
    "There are {n} {item} at the start.",
)
_ENDINGS = (
    "Answer: {n}",
    "The answer is {n}",
    "So {name} has {n} {item}. Answer: {n}",
    "In the end there are {n} {item}. Answer: {n}",
)


def _lower(act: str) -> str:
    return act[0].lower() + act[1:]


def solution_choices(chain: Chain, name: str, item: str, terse: bool) -> list[tuple[str, ...]]:
    """Every accepted wording of each line of a solution: an opening, one line per step, the answer.

    Terse problems have exactly one wording a line and no opening.
    """
    last = chain.values[-1]
    if terse:
        return [(f"Step: {equation}",) for equation in chain.equations] + [(f"Answer: {last}",)]
    words = {"name": name, "item": item}
    lines = [tuple(text.format(n=chain.start, **words) for text in _OPENINGS)]
    for step, equation in zip(chain.steps, chain.equations, strict=True):
        act = VERBS[step.operation][step.verb][1].format(n=step.amount)
        lines.append(
            tuple(
                link + text.format(act=_lower(act) if link else act, eq=equation, **words)
                for link in _LINKS
                for text in _RESULTS
            )
        )
    lines.append(tuple(text.format(n=last, **words) for text in _ENDINGS))
    return lines


def draw_name(rng: random.Random) -> tuple[str, str]:
    """(name, pronoun)"""
    pronoun = rng.choice(("he", "she"))
    return rng.choice(MALE if pronoun == "he" else FEMALE), pronoun


def draw_prompt(rng: random.Random, chain: Chain, name: str, pronoun: str, item: str, terse: bool) -> str:
    """One way to tell the problem."""
    if terse:
        text = str(chain.start)
        for step in chain.steps:
            text += f", {step.symbol} {step.amount}"
        return f"Compute step by step: {text}"
    acts = [
        VERBS[step.operation][step.verb][0].format(n=step.amount) + rng.choice(_PROMPT_TAILS[step.operation])
        for step in chain.steps
    ]
    style = rng.random()
    if style < 0.35:  # one sentence: "Tom has 12 apples, buys 7 more and eats 5."
        tale = f"{name} has {chain.start} {item}"
        for index, act in enumerate(acts):
            tale += (rng.choice((" and ", ", and ", " and then ")) if index == len(acts) - 1 else ", ") + act
        tale += "."
    else:
        tale = f"{name} {rng.choice(('has', 'starts with'))} {chain.start} {item}."
        for index, act in enumerate(acts):
            link = rng.choice(("", "", "Then ", "Later ", "Next ")) if index else ""
            subject = name if rng.random() < 0.3 else pronoun
            tale += f" {link}{subject if link else subject.capitalize() if subject == pronoun else subject} {act}."
    who = rng.choice((name, pronoun))
    tail = rng.choice(("", " now", " left", " in the end"))
    return f"{tale} How many {item} does {who} have{tail}?"
