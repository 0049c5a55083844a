"""A tiny run as one of several processes on simulated devices.

python -m tests.train.two_processes PORT I N DEVICES OUTPUT STEPS MESH [DELAY]
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from tests.train import tiny_run

SHARDS = 2


class Stream(tiny_run.Batches):
    """Random rows of one shard of two."""

    def __init__(self, shard: int, delay: float):
        super().__init__(delay=delay)
        self.shard = shard

    def __next__(self) -> dict[str, Any]:
        each = tiny_run.BATCH // SHARDS
        rows = slice(self.shard * each, (self.shard + 1) * each)
        return {name: array[rows] for name, array in super().__next__().items()}


def main() -> None:
    port, process, count, devices, output, steps, mesh, *delay = sys.argv[1:]
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(devices))
    if int(count) > 1:
        from kvjax.cli import cluster

        cluster.join(
            argparse.Namespace(coordinator=f"127.0.0.1:{port}", process=f"{process}/{count}")
        )
    from train import devices as layout
    from train.data.shards import Shards
    from train.loop import Stopped

    settings = tiny_run.config(output, int(steps), mesh=json.loads(mesh), data_shards=SHARDS)
    laid = layout.mesh_of(settings.mesh, tiny_run.BATCH, tiny_run.LENGTH)
    read: list[int] = []

    def opened(shard: int, of: int) -> Stream:
        read.append(shard)
        return Stream(shard, float(*delay or [0.0]))

    rows = layout.local_rows(laid, tiny_run.BATCH, tiny_run.LENGTH)
    data = Shards(SHARDS, tiny_run.BATCH, rows, opened)
    try:
        tiny_run.run(output, int(steps), json.loads(mesh), data=data)
    except Stopped as stopped:
        sys.exit(f"stopped: {stopped}")
    sys.stdout.write(json.dumps({"shards": read}) + "\n")


if __name__ == "__main__":
    main()
