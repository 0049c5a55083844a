"""Evaluation of bounded caches: tasks, one harness, statistics, reports."""
