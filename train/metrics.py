"""What a run tells: a JSONL line and TensorBoard scalars per log step, and one line to watch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eval.progress import duration

METRICS_FILE = "metrics.jsonl"


class Metrics:
    """Appends to `metrics.jsonl`; steps behind a resumed checkpoint are dropped first."""

    def __init__(self, directory: Path, first_step: int, tensorboard: bool = True):
        self.path = directory / METRICS_FILE
        directory.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_lines(self.path) if line["step"] <= first_step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.path)
        self._board = _board(directory / "tensorboard", first_step) if tensorboard else None

    def write(self, step: int, values: Mapping[str, float | list[float]]) -> None:
        """One line, and one scalar per number; lists, a number per layer, are in the line only."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self._board is not None:
            for name, value in numbers(values).items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """What is one number, not a list of one per layer."""
    return {name: value for name, value in line.items() if not isinstance(value, list)}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; one that a kill cut short is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _board(directory: Path, first_step: int) -> Any:
    """A TensorBoard writer, or None where tensorboardX is not installed."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory), purge_step=first_step + 1)


def show(line: str) -> None:
    """To standard error, in place on a terminal."""
    in_place = sys.stderr.isatty()
    sys.stderr.write(f"\r\x1b[K{line}" if in_place else f"{line}\n")
    sys.stderr.flush()


type Show = Callable[[str], None]


def progress_line(
    step: int, steps: int, values: Mapping[str, Any], tokens_per_second: float, left: float
) -> str:
    """step, loss and its parts, tokens per second, time left."""
    parts = " ".join(f"{name} {value:.4g}" for name, value in values.items() if name in _SHOWN)
    return f"[{step}/{steps}] {parts} | {tokens_per_second:.0f} tok/s | {duration(left)} left"


_SHOWN = ("loss", "kl", "ce", "capacity", "occupancy", "overlap", "gap_closed", "gate")
