"""Runs a task against a model, one request at a time, as a single user would."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from orl_eval.endpoints import Answerer
from orl_eval.errors import SettingError
from orl_eval.measures import Score, Summary, summarize
from orl_eval.tasks import Task


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished run: what was asked of whom, the aggregates and every scored answer."""

    task: str
    split: str
    seed: int
    model: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    summary: Summary
    scores: list[Score]


def check_request(task: Task, split: str, limit: int, seed: int) -> None:
    """Raises SettingError on a request that `evaluate` would refuse; cheap, so it can precede loading a model."""
    if split not in task.splits:
        raise SettingError(f"split is {split!r}; task {task.name} has the splits: {', '.join(task.splits)}")
    if limit < 1:
        raise SettingError(f"limit is {limit}; it must be at least 1 (the number of problems to answer)")
    if seed < 0:
        raise SettingError(f"seed is {seed}; it must be at least 0")


def evaluate(
    task: Task,
    answerer: Answerer,
    *,
    split: str = "test",
    limit: int = 200,
    seed: int = 0,
    on_score: Callable[[Score], None] | None = None,
) -> Evaluation:
    """Answers the first `limit` problems that `seed` draws from `split`; answer i is generated with seed + i.

    `on_score` is called after each answer. Raises SettingError before anything is answered.
    """
    check_request(task, split, limit, seed)
    scores: list[Score] = []
    for index, item in enumerate(task.items(split, limit, seed)):
        start = perf_counter()
        answer = answerer.answer(item.prompt, seed + index)
        seconds = perf_counter() - start
        score = Score(
            index=index,
            seed=seed + index,
            prompt=item.prompt,
            reference=item.reference,
            response=answer.text,
            finish_reason=answer.finish_reason,
            correct=task.correct(item, answer.text),
            final_correct=task.final_correct(item, answer.text),
            tokens=answer.tokens,
            forwards=answer.forwards,
            commits=answer.commits,
            seconds=seconds,
        )
        scores.append(score)
        if on_score is not None:
            on_score(score)
    return Evaluation(
        task=task.name,
        split=split,
        seed=seed,
        model=answerer.model,
        settings=answerer.settings(),
        environment=answerer.environment(),
        summary=summarize(scores),
        scores=scores,
    )
