"""Where a run's arrays lie: the mesh from a config, parameters by named rules, rows of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.models.sharding import MESH_AXES, ShardingRules, make_mesh


def mesh_of(sizes: Mapping[str, int], batch: int, length: int) -> Mesh | None:
    """The mesh of a config; None for one device and no wish.

    Raises:
      ValueError: more devices than there are, or rows that they do not divide.
    """
    if not sizes and jax.device_count() == 1:
        return None
    sizes = dict(sizes or {"data": -1})
    for axis, size in sizes.items():
        if size == -1:
            others = math.prod(other for name, other in sizes.items() if name != axis)
            sizes[axis] = max(1, jax.device_count() // others)
    shape = {axis: sizes.get(axis, 1) for axis in MESH_AXES}
    rows = shape["data"] * shape["fsdp"]
    if batch % rows:
        raise ValueError(
            f"batch={batch}: allowed are multiples of {rows}, the mesh's data x fsdp devices"
        )
    chunks = 2 * shape["sequence"] if shape["sequence"] > 1 else 1  # see kvjax.sequence_parallel
    if length % chunks:
        raise ValueError(
            f"length={length}: allowed are multiples of mesh.sequence={shape['sequence']} x 2"
        )
    return make_mesh(**shape)


def local_rows(mesh: Mesh | None, batch: int, length: int) -> list[int]:
    """The rows of a batch of which this process's devices hold something."""
    if mesh is None:
        return list(range(batch))
    held = batch_sharding(mesh).addressable_devices_indices_map((batch, length))
    return sorted({row for rows, _ in held.values() for row in range(*rows.indices(batch))})


def place_batch(
    batch: Mapping[str, np.ndarray], mesh: Mesh | None, rows: np.ndarray, count: int
) -> dict[str, jax.Array]:
    """Arrays [count, T] of which this process has the given `rows`, ascending.

    Rows lie over data and fsdp, tokens over sequence.
    """
    if mesh is None:
        return {name: jax.numpy.asarray(array) for name, array in batch.items()}
    sharding = batch_sharding(mesh)

    def placed(array: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            wanted = np.arange(*index[0].indices(count))
            return array[np.searchsorted(rows, wanted)][:, index[1]]

        return jax.make_array_from_callback((count, *array.shape[1:]), sharding, part)

    return {name: placed(np.asarray(array)) for name, array in batch.items()}


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of the arrays [B, T] of a batch."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "sequence"))


def state_shardings(state: Any, axes: Any, mesh: Mesh) -> Any:
    """Shardings of a train state: parameters by their logical axes, and their moments alike.

    Whatever in the optimizer's state has the name and shape of a parameter lies where it does;
    everything else stands on every device.
    """
    rules = ShardingRules()
    known = {
        name: (array.shape, NamedSharding(mesh, rules.spec(tuple(axes[name]), array.shape, mesh)))
        for name, array in state.params.items()
    }

    def sharding(path: Any, array: Any) -> NamedSharding:
        for part in reversed(path):
            name = getattr(part, "key", None)
            if name in known and known[name][0] == array.shape:
                return known[name][1]
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, state)
