import pytest

from orl_core.arithmetic import problems
from orl_eval.errors import SettingError, UnknownTaskError
from orl_eval.runner import evaluate
from orl_eval.tasks import get_task


def test_right_answers_score_one(fake, solutions):
    summary = evaluate(get_task("arithmetic"), fake(lambda _, prompt: solutions[prompt]), limit=20).summary
    assert (summary.n, summary.accuracy, summary.final_accuracy, summary.tpf) == (20, 1.0, 1.0, 4.0)


def test_a_bare_final_number_counts_only_for_final_accuracy(fake, solutions):
    answerer = fake(lambda _, prompt: solutions[prompt].splitlines()[-1])
    summary = evaluate(get_task("arithmetic"), answerer, limit=20).summary
    assert (summary.accuracy, summary.final_accuracy) == (0.0, 1.0)


def test_each_answer_keeps_its_own_verdict_and_seed(fake, solutions):
    answerer = fake(lambda index, prompt: solutions[prompt] if index % 2 else "no idea")
    evaluation = evaluate(get_task("arithmetic"), answerer, limit=6, seed=0)
    assert [score.correct for score in evaluation.scores] == [False, True] * 3
    assert answerer.seeds == [score.seed for score in evaluation.scores] == list(range(6))


def test_problems_are_those_of_the_split_and_seed(fake):
    evaluation = evaluate(get_task("arithmetic"), fake(lambda *_: ""), split="dev", limit=5, seed=3)
    assert [score.prompt for score in evaluation.scores] == [problem.prompt for problem in problems("dev", 5, 3)]
    assert evaluation.scores[4].seed == 7


def test_scores_are_reported_as_they_come(fake):
    seen = []
    evaluation = evaluate(get_task("arithmetic"), fake(lambda *_: ""), limit=3, on_score=seen.append)
    assert seen == evaluation.scores


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"limit": 0}, "at least 1"), ({"seed": -1}, "at least 0"), ({"split": "valid"}, "train, dev, test")],
)
def test_bad_requests_are_refused_before_any_answer(fake, changed, message):
    answerer = fake(lambda *_: "")
    with pytest.raises(SettingError, match=message):
        evaluate(get_task("arithmetic"), answerer, **changed)
    assert not answerer.seeds


def test_unknown_task_names_the_known_ones():
    with pytest.raises(UnknownTaskError, match=r"unknown task 'sums'; the tasks are: arithmetic"):
        get_task("sums")
