"""The rows of a batch over the devices of one process."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.cache import PaddedCache, PagedCache, map_rows


def spread(rows: Any, mesh: Mesh) -> Any:
    """An array [B, ...] or a cache with its rows split over `mesh`'s axis "data".

    A number of rows that the devices do not divide stands whole on each of them.
    """
    if isinstance(rows, PaddedCache | PagedCache):
        return map_rows(lambda array, axis: _placed(array, axis, mesh), rows)
    return _placed(rows, 0, mesh)


def _placed(array: jax.Array, axis: int, mesh: Mesh) -> jax.Array:
    divides = array.shape[axis] % mesh.size == 0
    spec = PartitionSpec(*([None] * axis), "data") if divides else PartitionSpec()
    return jax.device_put(array, NamedSharding(mesh, spec))
