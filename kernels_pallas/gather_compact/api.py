"""Gather of slots by index: the definition, and so far the only implementation."""

from __future__ import annotations

import jax.numpy as jnp
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
