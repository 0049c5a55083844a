"""One line that says what was done and how long the rest will take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

from eval.records import SampleResult


def silent(line: str) -> None:
    """Shows nothing."""
    del line


class Printer:
    """Shows lines on a stream: in place on a terminal, one below the other elsewhere."""

    def __init__(self, stream: TextIO | None = None):
        self.stream = sys.stderr if stream is None else stream
        self.in_place = self.stream.isatty()

    def __call__(self, line: str) -> None:
        if self.in_place:
            self.stream.write("\r\x1b[K" + line if line else "\n")
        elif line:
            self.stream.write(line + "\n")
        self.stream.flush()


class Progress:
    """Counts samples and estimates the time left."""

    def __init__(self, total: int, done: int, show: Callable[[str], None]):
        self.total, self.done, self.show = total, done, show
        self.seconds: list[float] = []
        self.failures = 0
        if done:
            show(f"resumed: {done} of {total} samples were done")

    def advance(self, result: SampleResult, seconds: float) -> None:
        self.done += 1
        self.seconds.append(seconds)
        self.failures += any(record.error for record in result.records)
        left = (self.total - self.done) * self._per_sample()
        full = next((r.score for r in result.records if r.policy == "full"), 0.0)
        others = [r.score for r in result.records if r.policy != "full"]
        evicted = f", evicting {sum(others) / len(others):.2f}" if others else ""
        failed = f" | {self.failures} FAILED" if self.failures else ""
        length = f" {result.length}" if result.length else f" {result.prompt_tokens} tokens"
        depth = "" if result.depth is None else f" depth {result.depth:g}"
        cut = f" (cut by {result.cut_tokens})" if result.cut_tokens else ""
        self.show(
            f"[{self.done}/{self.total}] {result.task} {result.haystack}{length}{cut}{depth} | "
            f"full {full:.2f}{evicted} | {seconds:.1f} s{failed} | "
            f"{duration(left)} left"
        )

    def close(self) -> None:
        self.show("")

    def _per_sample(self) -> float:
        """Mean of the recent samples; the first ones compile, later ones do not."""
        recent = self.seconds[-max(8, len(self.seconds) // 2) :]
        ordered = sorted(recent)
        if len(ordered) >= 4:
            ordered = ordered[:-1]
        return sum(ordered) / len(ordered)


def duration(seconds: float) -> str:
    """5 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
