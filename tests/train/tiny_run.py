"""A tiny training run; as a program, one that a test can kill, or lay over simulated devices.

python -m tests.train.tiny_run run DIR STEPS     prints the loss of every step
python -m tests.train.tiny_run meshes            prints losses for every mesh shape
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

LENGTH, BATCH = 32, 8
MESHES = (
    {},
    {"data": 8},
    {"fsdp": 8},
    {"tensor": 2, "data": 4},
    {"sequence": 4, "data": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
)


class Batches:
    """Random packed rows: two documents and padding; its state is the number of batches made."""

    def __init__(self, vocabulary: int = 97, delay: float = 0.0):
        self.vocabulary, self.made, self.delay = vocabulary, 0, delay
        self.rows = np.arange(BATCH)

    def __next__(self) -> dict[str, np.ndarray]:
        time.sleep(self.delay)
        rng = np.random.default_rng(self.made)
        self.made += 1
        segments = np.full((BATCH, LENGTH), -1, np.int32)
        segments[:, :20], segments[:, 20:29] = 0, 1
        positions = np.where(segments == 0, np.arange(LENGTH), np.arange(LENGTH) - 20)
        labels = segments >= 0
        labels[:, 19] = labels[:, 28] = False
        return {
            "tokens": rng.integers(1, self.vocabulary, (BATCH, LENGTH)).astype(np.int32),
            "segments": segments,
            "positions": np.where(segments >= 0, positions, 0).astype(np.int32),
            "labels": labels,
        }

    def get_state(self) -> Any:
        return {"made": self.made}

    def set_state(self, state: Any) -> None:
        self.made = state["made"]


def config(output: str, steps: int = 6, **changes: Any) -> Any:
    from train.config import from_mapping

    return from_mapping(
        {
            "model": "tiny",
            "module": {"kind": "retention", "width": 16, "memory": 4, "bias": 3.0, "positions": 12},
            "data": [{"text": "unused.txt"}],
            "length": LENGTH,
            "batch": BATCH,
            "steps": steps,
            "log": 1,
            "optimizer": {"learning_rate": 0.1, "warmup": 0, "schedule": "constant"},
            "checkpoint": {"steps": 2},
            "output": output,
            **changes,
        }
    )


def losses(output: str) -> dict[int, float]:
    from pathlib import Path

    from train.metrics import METRICS_FILE, read_lines

    return {line["step"]: line["loss"] for line in read_lines(Path(output) / METRICS_FILE)}


def run(
    output: str,
    steps: int,
    mesh: Any = None,
    delay: float = 0.0,
    data: Any = None,
    changes: Any = None,
) -> Any:
    import jax

    import kvjax
    from kvjax.models.sharding import parameter_shardings
    from tests import tiny
    from train import devices
    from train.loop import train
    from train.recipes import recipe_of

    settings = config(output, steps, **({"mesh": mesh} if mesh else {}), **(changes or {}))
    data = Batches(delay=delay) if data is None else data
    model = tiny.model(num_layers=2)
    laid = devices.mesh_of(settings.mesh, BATCH, LENGTH)
    if laid is not None:
        shardings = parameter_shardings(model.config, laid)
        model = kvjax.Decoder(
            model.config,
            {
                name: jax.device_put(model.parameters[name], where)
                for name, where in shardings.items()
            },
        )
    return train(settings, recipe_of(settings), model, data, lambda line: None)


def main() -> None:
    import tempfile

    import jax

    if sys.argv[1] == "run":
        run(sys.argv[2], int(sys.argv[3]), delay=0.05)
        json.dump(losses(sys.argv[2]), sys.stdout)
        return
    jax.config.update("jax_num_cpu_devices", 8)
    found = []
    for mesh in MESHES:
        with tempfile.TemporaryDirectory() as output:
            run(output, 3, mesh or {"data": 1})
            found.append(list(losses(output).values()))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
