"""Selection by bisection on counts: no sort, and the number kept is data."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from kernels_pallas.select.order import order_key


def keep_mask(
    scores: Float[Array, "*n S"],
    rank: Int[Array, "*n S"],
    valid: Bool[Array, "*n S"],
    budgets: Int[Array, "*n"],
) -> Bool[Array, "*n S"]:
    """As the reference."""
    return keep_largest(order_key(scores, rank, valid), budgets)


def keep_largest(key: UInt32[Array, "*n S"], budgets: Int[Array, "*n"]) -> Bool[Array, "*n S"]:
    """As the reference.

    Builds the k-th largest key bit by bit (32 counting passes), then keeps everything strictly
    above it and fills up with equal keys from the lowest slot.
    """
    budgets = budgets[..., None]

    def add_bit(step: Array, threshold: Array) -> Array:
        candidate = threshold | (jnp.uint32(1) << (jnp.uint32(31) - step.astype(jnp.uint32)))
        enough = jnp.sum(key >= candidate, axis=-1, keepdims=True, dtype=jnp.int32) >= budgets
        return jnp.where(enough, candidate, threshold)

    threshold = lax.fori_loop(0, 32, add_bit, jnp.zeros(budgets.shape, jnp.uint32))
    above = key > threshold
    equal = (key == threshold) & (key > 0)
    room = budgets - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room))


def competing_threshold(
    keys: UInt32[Array, "B *n S"],
    total: Int[Array, " B"],
    low: Int[Array, "B *n"],
    high: Int[Array, "B *n"],
) -> UInt32[Array, " B"]:
    """The largest key at or above which the heads *n of a row have at least `total` entries.

    A head counts with at least `low` and at most `high` of its S entries. 0 if there are too few.
    """
    others = tuple(range(1, keys.ndim))
    total = jnp.expand_dims(total, others)

    def add_bit(step: Array, threshold: Array) -> Array:
        candidate = threshold | (jnp.uint32(1) << (jnp.uint32(31) - step.astype(jnp.uint32)))
        counts = jnp.clip(jnp.sum(keys >= candidate, axis=-1, dtype=jnp.int32), low, high)
        enough = jnp.sum(counts[..., None], axis=others, keepdims=True) >= total
        return jnp.where(enough, candidate, threshold)

    threshold = lax.fori_loop(0, 32, add_bit, jnp.zeros(total.shape, jnp.uint32))
    return threshold.reshape(-1)
