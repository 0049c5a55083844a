"""Tasks by name. A new task is one file with a `TASK` and one line here."""

from eval.tasks import needle, ruler
from eval.tasks.base import Sample, Task

TASKS: dict[str, Task] = {task.name: task for task in (needle.TASK, ruler.TASK)}

__all__ = ["TASKS", "Sample", "Task"]
