"""Tasks by name. A new task is one file with a `TASK` and one line here."""

from eval.tasks import (
    infinitebench,
    longbench,
    longbench_v2,
    longmemeval,
    longproc,
    needle,
    problems,
    ruler,
    scbench,
)
from eval.tasks.base import Sample, Task

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        needle.TASK,
        ruler.TASK,
        longbench.TASK,
        longbench_v2.TASK,
        infinitebench.TASK,
        scbench.TASK,
        longmemeval.TASK,
        longproc.TASK,
        problems.GSM8K,
        problems.MATH_500,
        problems.AIME,
    )
}

__all__ = ["TASKS", "Sample", "Task"]
