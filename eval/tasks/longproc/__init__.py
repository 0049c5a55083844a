"""LongProc: long procedures written out step by step; `task` has the loader and the scores."""

from eval.tasks.longproc.task import SUBSETS, TASK, load, score

__all__ = ["SUBSETS", "TASK", "load", "score"]
