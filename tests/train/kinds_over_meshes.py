"""Run by `test_kinds_over_meshes` in a process of its own, which has eight CPU devices.

Prints as JSON the losses of a few steps of every kind of module on one device and over meshes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import jax
import numpy as np

from tests import tiny
from tests.train import tiny_run

KINDS: dict[str, dict[str, Any]] = {
    "indexer": {"module": {"kind": "indexer", "near": 2, "sinks": 1, "foresee": True}},
    "memory": {"module": {"kind": "memory", "name": "snapkv+memory"}},
    "indexmem": {"module": {"kind": "indexmem", "near": 2, "sinks": 1}},
    "eraser": {
        "module": {"kind": "eraser", "rank": 2, "reply": 8},
        "data": [{"erase": ["chain"], "lengths": 16, "span_tokens": 4}],
    },
}
MESHES = ({"data": 1}, {"data": 2, "fsdp": 2, "tensor": 2})
STEPS = 2


class Parts(tiny_run.Batches):
    """Rows of one document: prefix, span, suffix and reply."""

    def __next__(self) -> dict[str, np.ndarray]:
        batch = super().__next__()
        batch["segments"] = np.where(batch["segments"] == 0, 0, -1).astype(np.int32)
        batch["parts"] = np.repeat([[0, 1, 2, 3]], tiny_run.BATCH, axis=0).repeat(5, axis=1)
        batch["parts"] = np.pad(batch["parts"], ((0, 0), (0, tiny_run.LENGTH - 20))).astype(
            np.int32
        )
        batch["labels"] = (batch["segments"] == 0) & (batch["parts"] == 3)
        batch["labels"][:, 19] = False
        return batch


def losses(kind: str, mesh: dict[str, int]) -> list[float]:
    data = Parts() if kind == "eraser" else tiny_run.Batches()
    with tempfile.TemporaryDirectory() as output:
        tiny_run.run(output, STEPS, mesh, data=data, changes=KINDS[kind])
        return list(tiny_run.losses(output).values())


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    with tiny.quick_compilation():
        found = {kind: [losses(kind, mesh) for mesh in MESHES] for kind in KINDS}
    json.dump(found, sys.stdout)
