"""Batches of a mixture as a process of its own makes them: `python -m tests.train.data.stream`.

Reads {"root", "count", "seed", "state"} from its input and writes the batches' hashes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.eval.tasks import written
from tests.train.data.tokens import StableTokenizer
from train import data

LENGTH, BATCH = 256, 2


def mixture(root: Path) -> tuple[data.SourceConfig, ...]:
    """Text, conversations and needles, of lengths that leave rows open in the middle of a batch."""
    if not (root / "books").exists():
        (root / "books").mkdir()
        for book in range(3):
            blocks = [
                f"{'Book ' + 'abc'[book]} " + f"word {i} " * (7 + 31 * i % 60) for i in range(12)
            ]
            (root / "books" / f"{book}.txt").write_text("\n\n".join(blocks))
        talk = [
            {"role": "user", "content": "How many?"},
            {"role": "assistant", "content": "Many, " * 9},
        ]
        written.jsonl(root / "chat.jsonl", [{"messages": talk * n} for n in (1, 2, 3)])
    return data.read(
        "data",
        [
            {"text": str(root / "books"), "characters": 900},
            {"chat": str(root / "chat.jsonl"), "weight": 0.5},
            {"task": "needle", "lengths": [150, 250], "haystacks": ["sentences"], "weight": 2},
        ],
    )


def build(root: Path, seed: int = 0, **options: Any) -> data.Batches:
    options = {"length": LENGTH, "batch": BATCH} | options
    return data.build(mixture(root), StableTokenizer(), seed=seed, **options)


def digest(batch: data.Batch) -> str:
    content = hashlib.sha256()
    for name in ("tokens", "segments", "positions", "labels"):
        content.update(np.ascontiguousarray(batch[name]).tobytes())
    return content.hexdigest()


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    batches = build(Path(asked["root"]), asked["seed"])
    if asked["state"] is not None:
        batches.set_state(asked["state"])
    json.dump([digest(next(batches)) for _ in range(asked["count"])], sys.stdout)
