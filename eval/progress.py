"""One line that says what was done and how long the rest will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from eval.records import SampleResult
from eval.stages import Engine


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


class Clock:
    """Seconds since the last lap, all of them and the model's, without compilation."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.last = self._now()

    def _now(self) -> tuple[float, float]:
        compiling = self.engine.compile_seconds
        return time.perf_counter() - compiling, self.engine.model_seconds

    def lap(self) -> dict[str, Any]:
        before, self.last = self.last, self._now()
        wall, model = (now - then for now, then in zip(self.last, before, strict=True))
        return {"wall_seconds": round(wall, 4), "model_seconds": round(model, 4)}


class Progress:
    """Counts samples and estimates the time left."""

    def __init__(self, total: int, done: int, show: Callable[[str], None], again: int = 0):
        """`again`: samples that failed in an earlier run."""
        self.total, self.done, self.show = total, done, show
        self.seconds: list[float] = []
        self.failures = 0
        if done or again:
            failed = f"; {again} that failed are asked again" if again else ""
            show(f"resumed: {done} of {total} samples were done{failed}")

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
