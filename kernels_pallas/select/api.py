"""Selection as the cache uses it: a mask of kept slots, and their indices in position order."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.select import reference, threshold
from kernels_pallas.select.order import order_key


def keep_mask(
    scores: Float[Array, "*n S"],
    rank: Int[Array, "*n S"],
    valid: Bool[Array, "*n S"],
    budgets: Int[Array, "*n"],
    *,
    implementation: Literal["reference", "threshold"] | None = None,
) -> Bool[Array, "*n S"]:
    """The min(budget, valid) entries that stay, by (protected, score, lowest slot).

    `rank` > 0 marks protected entries, larger first. Non-finite scores are kept last.
    """
    chosen = reference if implementation == "reference" else threshold
    return chosen.keep_largest(order_key(scores, rank, valid), budgets)


def kept_indices(
    keep: Bool[Array, "*n S"], capacity: int
) -> tuple[Int[Array, "*n C"], Int[Array, "*n"]]:
    """Slots that stay in ascending order, then S for unused places; and how many stay.

    At most `capacity` stay: of more, the first ones.
    """
    slots = keep.shape[-1]
    running = jnp.cumsum(keep, axis=-1, dtype=jnp.int32)
    wanted = jnp.arange(1, capacity + 1, dtype=jnp.int32)
    find = jax.vmap(lambda row: jnp.searchsorted(row, wanted))
    indices = find(running.reshape(-1, slots)).astype(jnp.int32)
    indices = indices.reshape(*keep.shape[:-1], capacity)
    return indices, jnp.minimum(running[..., -1], capacity)
