"""Selection by a stable sort: the definition."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from kernels_pallas.select.order import order_key


def keep_mask(
    scores: Float[Array, "*n S"],
    rank: Int[Array, "*n S"],
    valid: Bool[Array, "*n S"],
    budgets: Int[Array, "*n"],
) -> Bool[Array, "*n S"]:
    """The `budgets` entries of each row that stay, by (protected, score, lowest slot)."""
    return keep_largest(order_key(scores, rank, valid), budgets)


def keep_largest(key: UInt32[Array, "*n S"], budgets: Int[Array, "*n"]) -> Bool[Array, "*n S"]:
    """True for the `budgets` largest keys of each row; equal keys by lowest slot; 0 never."""
    order = jnp.argsort(key, axis=-1, stable=True, descending=True)
    place = jnp.argsort(order, axis=-1)
    return (place < budgets[..., None]) & (key > 0)
