"""Gather of slots by index, and compaction by it: the definitions."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def gather_slots(array: Array, indices: Int[Array, "*n C"], fill: int | float = 0) -> Array:
    """`array` [*n, S, ...] at `indices` along S, `fill` where the index is S or more.

    Returns [*n, C, ...] in the array's dtype.
    """
    axis = indices.ndim - 1
    slots = array.shape[axis]
    trailing = (1,) * (array.ndim - indices.ndim)
    index = jnp.minimum(indices, slots - 1).reshape(*indices.shape, *trailing)
    taken = jnp.take_along_axis(array, index, axis=axis, mode="promise_in_bounds")
    present = (indices < slots).reshape(index.shape)
    return jnp.where(present, taken, jnp.asarray(fill, array.dtype))


def compact(
    arrays: tuple[Array, ...],
    indices: Int[Array, "*n C"],
    lengths: Int[Array, "*n"],
    held: Int[Array, "*n"],
    table: Int[Array, "*n M"] | None = None,
) -> tuple[Array, ...]:
    """Each head's slots at `indices` moved to its front, 0 behind them, in `arrays` [*n, S, ...].

    With `table`, n is (L, B, K), the arrays are pools [B, N, P, ...] of pages, S is M P, and slot
    s of a head is slot s % P of page `table[..., s // P]`; pages that no head holds are not
    touched.
    """
    del held  # What is behind is cleared wherever it ends.
    count = indices.shape[-1]
    if table is None:
        slots = arrays[0].shape[indices.ndim - 1]
    else:
        slots = table.shape[-1] * arrays[0].shape[2]
    place = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
    used = place < lengths[..., None]
    unused = jnp.full((*lengths.shape, slots - count), slots, jnp.int32)
    indices = jnp.concatenate([jnp.where(used, indices, slots), unused], axis=-1)
    if table is None:
        return tuple(gather_slots(array, indices) for array in arrays)

    row = jnp.arange(table.shape[1])[None, :, None, None]

    def in_pages(pool: Array) -> Array:
        pages, page = pool.shape[1:3]
        held_pages = pool[row, jnp.maximum(table, 0)]  # [L, B, K, M, P, ...]
        slots_of_heads = held_pages.reshape(*lengths.shape, slots, *pool.shape[3:])
        moved = gather_slots(slots_of_heads, indices)
        moved = moved.reshape(*table.shape, page, *pool.shape[3:])
        target = jnp.where(table >= 0, table, pages)
        return pool.at[row, target].set(moved, mode="drop", unique_indices=True)

    return tuple(in_pages(pool) for pool in arrays)
