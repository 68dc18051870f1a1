"""The arithmetic task: problems are seeded and never shared by splits, and the verifier reads every line."""

import random
import re

import pytest

from orl_core.arithmetic import SPLITS, Chain, Problem, Step, draw_problem, problems, verify, verify_final, wording_keys
from orl_core.arithmetic.problem import MAX_AMOUNT, MAX_START, MAX_STEPS, MAX_VALUE, dump_reference, load_reference
from orl_core.arithmetic.text import solution_choices
from orl_core.errors import ConfigError

SAMPLE = 2000

TALE = Chain(12, (Step("add", 7, 0), Step("subtract", 5, 5)))
REFERENCE = dump_reference(TALE, "Tom", "apples", terse=False)
SOLUTION = """\
Tom starts with 12 apples.
Buying 7 makes 12 + 7 = 19.
Then eating 5 gives 19 - 5 = 14 apples.
In the end there are 14 apples. Answer: 14"""


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[Problem]]:
    return {split: problems(split, SAMPLE, seed=3) for split in SPLITS}


def content(problem: Problem) -> tuple[int, tuple[tuple[str, int], ...]]:
    """What makes two problems the same: start and operations, whatever the words."""
    chain = load_reference(problem.reference)[0]
    return chain.start, tuple((step.operation, step.amount) for step in chain.steps)


def test_a_problem_is_a_function_of_split_seed_and_index():
    forward = [draw_problem("train", 1, index) for index in range(20)]
    state = random.getstate()
    backward = [draw_problem("train", 1, index) for index in reversed(range(20))]
    assert random.getstate() == state
    assert forward == backward[::-1]
    assert forward == problems("train", 20, seed=1)
    assert forward != problems("train", 20, seed=2)
    assert forward != problems("dev", 20, seed=1)


def test_the_first_test_problem_stays_the_same():
    """A data set is named by its seed, so a change of the generator must be noticed."""
    assert draw_problem("test", 0, 0).prompt == (
        "Ben has 4 buttons. Ben loses half of them. Later Ben spends 2. He receives 6. Then Ben uses 6 of them. "
        "Then he borrows 3. How many buttons does Ben have in the end?"
    )


def test_no_two_splits_share_a_problem(drawn):
    contents = {split: {content(problem) for problem in drawn[split]} for split in SPLITS}
    for split in SPLITS:
        assert len(contents[split]) > 0.7 * SAMPLE
        for other in SPLITS:
            assert split == other or not contents[split] & contents[other]


def test_words_do_not_decide_the_split():
    other_verbs = Chain(12, (Step("add", 7, 3), Step("subtract", 5, 0)))
    assert other_verbs.split() == TALE.split()


def test_splits_have_their_shares():
    rng = random.Random(0)
    chains = [
        Chain(rng.randint(2, 60), tuple(Step("add", rng.randint(1, 9), 0) for _ in range(3))) for _ in range(20_000)
    ]
    shares = {split: sum(chain.split() == split for chain in chains) / len(chains) for split in SPLITS}
    assert shares["dev"] == pytest.approx(0.05, abs=0.01)
    assert shares["test"] == pytest.approx(0.05, abs=0.01)


def test_every_drawn_solution_is_verified(drawn):
    for problem in (p for split in SPLITS for p in drawn[split]):
        assert verify(problem.prompt, problem.solution, problem.reference), problem
        assert verify_final(problem.prompt, problem.solution, problem.reference), problem
        assert wording_keys(problem.solution, problem.reference) is not None


def test_values_stay_in_range_and_operations_are_exact(drawn):
    lengths = set()
    for problem in drawn["train"]:
        chain = load_reference(problem.reference)[0]
        lengths.add(len(chain.steps))
        assert 2 <= chain.start <= MAX_START
        assert all(0 <= value <= MAX_VALUE for value in chain.values)
        assert all(1 <= step.amount <= MAX_AMOUNT for step in chain.steps)
        for value, step in zip(chain.values, chain.steps, strict=False):
            assert step.operation != "halve" or value % 2 == 0
        for equation in chain.equations:
            left, right = equation.split(" = ")
            assert eval(left) == int(right)
    assert lengths == set(range(1, MAX_STEPS + 1))


def test_the_prompt_tells_every_number_of_the_problem(drawn):
    for problem in drawn["dev"]:
        chain, name, item, terse = load_reference(problem.reference)
        told = [int(number) for number in re.findall(r"\d+", problem.prompt)]
        expected = [step.amount for step in chain.steps if terse or step.operation != "halve"]
        assert told == [chain.start, *expected]
        assert terse or (name in problem.prompt and item in problem.prompt)


def test_a_hand_written_solution_is_verified():
    assert verify("", SOLUTION, REFERENCE)
    assert verify("", f"\n{SOLUTION}\n", REFERENCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("19 - 5 = 14", "19 - 5 = 13"),  # wrong result
        ("12 + 7 = 19", "11 + 7 = 19"),  # wrong operand
        ("19 - 5 = 14 apples", "19 - 4 = 15 apples"),  # a right equation of another problem
        ("Then eating", "Thus eating"),  # a link that the task does not have
        ("Then eating", "Then Eating"),
        ("Then eating", "Then selling"),  # another verb
        ("gives 19 - 5 = 14 apples", "gives 19 - 5 = 14 pears"),  # another item
        ("Tom starts", "Ben starts"),  # another name
        ("with 12 apples", "with 13 apples"),  # wrong start
        ("Answer: 14", "Answer: 15"),
        ("there are 14", "there are 15"),
        ("Buying 7 makes 12 + 7 = 19.\n", ""),  # missing step
        ("Tom starts with 12 apples.\n", ""),  # missing opening
        ("\nIn the end there are 14 apples. Answer: 14", ""),  # missing answer
        ("Then eating", "Buying 7 makes 12 + 7 = 19.\nThen eating"),  # a step twice
        ("Answer: 14", "Answer: 14\nAnswer: 14"),  # extra line
        ("makes 12 + 7 = 19.\n", "makes 12 + 7 = 19. \n"),  # trailing space
        ("19.\nThen", "19.\n\nThen"),  # empty line
    ],
)
def test_a_changed_solution_is_not_verified(old, new):
    assert SOLUTION.count(old) == 1
    changed = SOLUTION.replace(old, new)
    assert not verify("", changed, REFERENCE)
    assert wording_keys(changed, REFERENCE) is None


def test_swapped_lines_are_not_verified():
    first, second, third, last = SOLUTION.split("\n")
    assert not verify("", "\n".join([first, third, second, last]), REFERENCE)


def test_no_single_digit_of_a_solution_may_change(drawn):
    for problem in drawn["test"][:100]:
        for match in re.finditer(r"\d", problem.solution):
            at, digit = match.start(), (int(match.group()) + 1) % 10
            changed = problem.solution[:at] + str(digit) + problem.solution[at + 1 :]
            assert not verify(problem.prompt, changed, problem.reference), changed


def test_a_solution_of_another_problem_is_not_verified(drawn):
    for problem, other in zip(drawn["test"], drawn["test"][1:], strict=False):
        same = content(problem) == content(other)
        assert same or not verify(problem.prompt, other.solution, problem.reference)


def test_the_final_number_alone_is_checked_by_verify_final():
    assert verify_final("", "nonsense. Answer: 14", REFERENCE)
    assert verify_final("", "The answer is 14\n", REFERENCE)
    assert not verify("", "nonsense. Answer: 14", REFERENCE)
    for wrong in ("Answer: 13", "Answer: 14 apples", "14", "", "Answer: 14\nand then more"):
        assert not verify_final("", wrong, REFERENCE)


def test_wording_keys_tell_solutions_apart():
    keys = wording_keys(SOLUTION, REFERENCE)
    assert keys is not None
    choices = solution_choices(*load_reference(REFERENCE))
    assert "\n".join(line[key] for line, key in zip(choices, keys, strict=True)) == SOLUTION
    other = SOLUTION.replace("Buying 7 makes 12 + 7 = 19.", "Buying 7, we get 12 + 7 = 19.")
    different = wording_keys(other, REFERENCE)
    assert different is not None
    assert [a != b for a, b in zip(keys, different, strict=True)] == [False, True, False, False]


def test_every_wording_of_a_line_is_accepted():
    lines = solution_choices(*load_reference(REFERENCE))
    for index, wordings in enumerate(lines):
        assert len(set(wordings)) == len(wordings) > 1
        for wording in wordings:
            chosen = [choices[0] for choices in lines]
            chosen[index] = wording
            assert verify("", "\n".join(chosen), REFERENCE)


def test_terse_problems_have_one_solution():
    reference = dump_reference(TALE, "Tom", "apples", terse=True)
    assert verify("", "Step: 12 + 7 = 19\nStep: 19 - 5 = 14\nAnswer: 14", reference)
    assert not verify("", SOLUTION, reference)


def test_reference_round_trip(drawn):
    for problem in drawn["train"][:200]:
        assert dump_reference(*load_reference(problem.reference)) == problem.reference
    assert load_reference(REFERENCE) == (TALE, "Tom", "apples", False)


@pytest.mark.parametrize("text", ["", "14", "[]", "{}", '{"start": 1, "steps": [[1]], "name": "", "item": ""}'])
def test_a_foreign_reference_is_a_typed_error(text):
    with pytest.raises(ConfigError, match="not a reference of the arithmetic task"):
        verify("", SOLUTION, text)


def test_an_unknown_split_is_a_typed_error():
    with pytest.raises(ConfigError, match=r"unknown split 'valid'; there are train, dev, test"):
        draw_problem("valid", 0, 0)
