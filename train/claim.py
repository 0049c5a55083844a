"""A run's directory: what it holds a run of, written down once and checked ever after."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax

from kvjax import processes
from train.config import TrainConfig

CONFIG_FILE = "config.json"


def claim(config: TrainConfig) -> None:
    """Refuses a directory that holds another run; writes down what this one is.

    Raises:
      ValueError: the output holds a run of another config.
    """
    path = Path(config.output) / CONFIG_FILE
    found = _read(path)
    processes.wait_for_all("claim: read")
    if found is not None:
        if found.get("config_hash") != config.hash:
            raise ValueError(
                f"output {config.output!r} holds a run of another config "
                f"({found.get('config_hash')}, this is {config.hash}): choose another output, or "
                "delete it"
            )
        return
    if processes.is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "config_hash": config.hash,
            "data_shards": data_shards(config),
            "config": dataclasses.asdict(config),
        }
        text = json.dumps(content, indent=1, default=str) + "\n"
        # Renamed into place: a run killed while it writes would never start again.
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    processes.wait_for_all("claim: written")


def data_shards(config: TrainConfig) -> int:
    """Streams that a batch is made of: as asked, as the run began, or one per process."""
    if config.data_shards is not None:
        return config.data_shards
    found = _read(Path(config.output) / CONFIG_FILE) or {}
    return int(found.get("data_shards", math.gcd(config.batch, jax.process_count())))


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
