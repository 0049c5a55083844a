"""Selection by a stable sort: the definition."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32


def keep_largest(key: UInt32[Array, "*n S"], budgets: Int[Array, "*n"]) -> Bool[Array, "*n S"]:
    """True for the `budgets` largest keys of each row; equal keys by lowest slot; 0 never."""
    order = jnp.argsort(key, axis=-1, stable=True, descending=True)
    place = jnp.argsort(order, axis=-1)
    return (place < budgets[..., None]) & (key > 0)
