"""The tasks by name."""

from orl_eval.errors import UnknownTaskError
from orl_eval.tasks.arithmetic import Arithmetic
from orl_eval.tasks.base import Item, Task

__all__ = ["TASKS", "Item", "Task", "get_task"]

TASKS: dict[str, type[Task]] = {"arithmetic": Arithmetic}


def get_task(name: str) -> Task:
    """The task called `name`; raises UnknownTaskError."""
    if name not in TASKS:
        raise UnknownTaskError(f"unknown task {name!r}; the tasks are: {', '.join(sorted(TASKS))}")
    return TASKS[name]()
