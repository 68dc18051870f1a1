"""What orl-eval alone can do: run a task against any answerer; without dlmrt it says what to install."""

from importlib.util import find_spec

from orl_core.arithmetic import problems
from orl_eval.endpoints import Answer, DecodeSettings, LocalEngine
from orl_eval.errors import MissingExtraError
from orl_eval.runner import evaluate
from orl_eval.tasks import get_task

SOLUTIONS = {problem.prompt: problem.solution for problem in problems("test", 20, 0)}


class Oracle:
    model = "oracle"

    def answer(self, prompt, seed):
        return Answer(SOLUTIONS[prompt], finish_reason="stop", tokens=12, forwards=4, commits=1)

    def settings(self):
        return {}

    def environment(self):
        return {}


summary = evaluate(get_task("arithmetic"), Oracle(), limit=20).summary
assert (summary.accuracy, summary.tpf, summary.tpf_commit) == (1.0, 3.0, 12 / 5)

if find_spec("dlmrt") is None:
    message = ""
    try:
        LocalEngine.load("embedded:base", DecodeSettings())
    except MissingExtraError as error:
        message = str(error)
    assert "orl-eval[local]" in message
print("orl-eval works")
