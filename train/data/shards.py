"""The rows of a batch from several independent streams, each process reading those it needs.

A batch of B rows from N shards takes rows i B / N to (i + 1) B / N from shard i. What is in it
follows from N alone, so a run goes on with the same batches over other processes and meshes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from kvjax import processes


class Shards:
    """The shards that hold `rows` of a batch; `rows` of it are then those of these shards.

    `open_shard(i, n)` gives an iterator with `get_state` and `set_state` over batches of B / n
    rows.
    """

    def __init__(
        self,
        count: int,
        batch: int,
        rows: Iterable[int],
        open_shard: Callable[[int, int], Any],
    ):
        if batch % count:
            raise ValueError(f"data_shards={count}: allowed are divisors of batch={batch}")
        self.count = count
        each = batch // count
        needed = sorted({row // each for row in rows})
        self.rows = np.concatenate([np.arange(i * each, (i + 1) * each) for i in needed])
        self._streams = {i: open_shard(i, count) for i in needed}

    def __next__(self) -> dict[str, np.ndarray]:
        parts = [next(stream) for stream in self._streams.values()]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def get_state(self) -> dict[str, Any]:
        """Where all shards are, those of other processes too: every process has to ask."""
        mine = {i: json.dumps(stream.get_state()) for i, stream in self._streams.items()}
        states = processes.union(mine)
        return {"shards": [json.loads(states[i]) for i in range(self.count)]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state of the same number of shards, whoever read them.

        Raises:
          ValueError: a state of another number of shards, or of other data.
        """
        states = state.get("shards", ())
        if len(states) != self.count:
            raise ValueError(
                f"data_shards={self.count}: the checkpoint has {len(states)}; the same is needed "
                "to go on"
            )
        for i, stream in self._streams.items():
            stream.set_state(states[i])
