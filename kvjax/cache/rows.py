"""Rows of caches: stack them, take some, and count bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from kvjax.cache.padded import PaddedCache
from kvjax.cache.paged import PagedCache
from kvjax.policies.observation import State

type Cache = PaddedCache | PagedCache


def nbytes(cache: Any) -> int:
    """Bytes of all arrays of a cache (or any pytree of arrays), the sum of their sizes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def map_rows[C: Cache](function: Callable[..., Array], *caches: C) -> C:
    """Applies `function(*arrays, axis)` to every array of the caches, `axis` its batch axis."""
    axes = caches[0].row_axes

    def mapped(name: str, parts: Sequence[Any]) -> Any:
        axis = axes.get(name, 0)
        return jax.tree.map(lambda *arrays: function(*arrays, axis), *parts)

    fields: dict[str, Any] = {}
    for field in dataclasses.fields(caches[0]):
        parts = [getattr(cache, field.name) for cache in caches]
        if field.name == "policy_state":
            fields[field.name] = State(
                slots=mapped("slots", [part.slots for part in parts]),
                layer=mapped("layer", [part.layer for part in parts]),
            )
        else:
            fields[field.name] = mapped(field.name, parts)
    return type(caches[0])(**fields)


def stack_rows[C: Cache](caches: Sequence[C]) -> C:
    """One cache whose rows are the rows of all, in order.

    Raises:
      ValueError: the caches differ in anything but the number of rows.
    """
    if not caches:
        raise ValueError("stack_rows: no caches given, at least one is needed")
    one_row = [jax.eval_shape(_first_row, cache) for cache in caches]
    for cache, shape in zip(caches[1:], one_row[1:], strict=True):
        if shape != one_row[0]:
            raise ValueError(
                f"stack_rows: caches must agree in layers, heads, capacity, dtype and state, got "
                f"{type(caches[0]).__name__} of capacity {caches[0].capacity} and "
                f"{type(cache).__name__} of capacity {cache.capacity}"
            )
    return map_rows(lambda *arrays: jnp.concatenate(arrays[:-1], axis=arrays[-1]), *caches)


def take_rows[C: Cache](cache: C, rows: Sequence[int] | Int[Array, " R"]) -> C:
    """The given rows of a cache, e.g. `take_rows(cache, [0, 0, 0])` for three copies of row 0."""
    index = jnp.asarray(rows, jnp.int32)
    return map_rows(lambda array, axis: jnp.take(array, index, axis=axis), cache)


def _first_row[C: Cache](cache: C) -> C:
    return map_rows(lambda array, axis: lax.slice_in_dim(array, 0, 1, axis=axis), cache)
