"""Selection as the cache uses it: a mask of kept slots, and their indices in position order."""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from kernels_pallas import dispatch

type SelectImplementation = Literal["reference", "threshold", "digits", "mosaic_gpu"]

_PACKAGE = "kernels_pallas.select"
_KEEP = dispatch.Operation(
    "keep_mask", _PACKAGE, ("reference", "threshold", "digits", "mosaic_gpu")
)
_COMPETE = dispatch.Operation("competing_threshold", _PACKAGE, ("threshold", "digits"))


def keep_mask(
    scores: Float[Array, "*n S"],
    rank: Int[Array, "*n S"],
    valid: Bool[Array, "*n S"],
    budgets: Int[Array, "*n"],
    *,
    implementation: SelectImplementation | None = None,
) -> Bool[Array, "*n S"]:
    """The min(budget, valid) entries that stay, by (protected, score, lowest slot).

    `rank` > 0 marks protected entries, larger first. Non-finite scores are kept last.
    """
    return _KEEP(scores, rank, valid, budgets, implementation=implementation, portable=_portable())


def competing_threshold(
    keys: UInt32[Array, "B *n S"],
    total: Int[Array, " B"],
    low: Int[Array, "B *n"],
    high: Int[Array, "B *n"],
    *,
    implementation: Literal["threshold", "digits"] | None = None,
) -> UInt32[Array, " B"]:
    """The largest key at or above which the heads *n of a row have at least `total` entries.

    `keys` are `order_key`. A head counts with at least `low` and at most `high` of its S entries.
    0 if all of them are too few.
    """
    return _COMPETE(keys, total, low, high, implementation=implementation, portable=_portable())


def _portable() -> str:
    return "digits" if dispatch.platform() in dispatch.KERNELS else "threshold"


def kept_indices(
    keep: Bool[Array, "*n S"], capacity: int
) -> tuple[Int[Array, "*n C"], Int[Array, "*n"]]:
    """Slots that stay in ascending order, then S for unused places; and how many stay.

    At most `capacity` stay: of more, the first ones.
    """
    slots = keep.shape[-1]
    if dispatch.platform() == "tpu":
        # Reads at computed places cost a TPU more than all exchanges of a sort.
        slot = lax.broadcasted_iota(jnp.int32, keep.shape, keep.ndim - 1)
        found = jnp.sort(jnp.where(keep, slot, slots), axis=-1)[..., :capacity]
        widths = [(0, 0)] * (keep.ndim - 1) + [(0, capacity - found.shape[-1])]
        count = jnp.sum(keep, axis=-1, dtype=jnp.int32)
        return jnp.pad(found, widths, constant_values=slots), jnp.minimum(count, capacity)
    running = jnp.cumsum(keep, axis=-1, dtype=jnp.int32)
    wanted = jnp.arange(1, capacity + 1, dtype=jnp.int32)
    find = partial(_find, wanted=wanted)
    for _ in running.shape[:-1]:  # one by one: axes that lie over devices are not merged
        find = jax.vmap(find)
    return find(running).astype(jnp.int32), jnp.minimum(running[..., -1], capacity)


def _find(row: Int[Array, " S"], wanted: Int[Array, " C"]) -> Int[Array, " C"]:
    return jnp.searchsorted(row, wanted)
