"""Splitting a total among heads: by competition of their entries, or by real-valued shares."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from kernels_pallas.select import competing_threshold

_PARTS = 64  # fixed point: shares are resolved to 1/64 entry


def competing_budgets(
    keys: UInt32[Array, "B *n S"],
    total: Int[Array, " B"],
    low: Int[Array, "B *n"],
    high: Int[Array, "B *n"],
) -> Int[Array, "B *n"]:
    """How many of the `total` largest keys of a row lie in each head, within [low, high].

    `keys` are `kernels_pallas.select.order_key`: what is kept first has the largest. A head is
    sure of its best `low` entries and gets at most `high`; a threshold found by bisection on the
    counts makes the rest add up exactly. Equal keys go to the first heads. The result sums to
    `total`, clipped to [sum(low), sum(high)].
    """

    threshold = competing_threshold(keys, total, low, high)
    threshold = jnp.expand_dims(threshold, tuple(range(1, keys.ndim)))

    def heads(chosen: Bool[Array, "B *n S"]) -> Int[Array, "B N"]:
        counts = jnp.clip(jnp.sum(chosen, axis=-1, dtype=jnp.int32), low, high)
        return counts.reshape(counts.shape[0], -1)

    filled = _fill(heads(keys > threshold), heads(keys >= threshold), total)
    return filled.reshape(low.shape)


def apportion(
    shares: Float[Array, "B N"],
    total: Int[Array, " B"],
    low: Int[Array, "B N"],
    high: Int[Array, "B N"],
) -> Int[Array, "B N"]:
    """Integers in [low, high] near `shares` that sum to `total`, clipped to what is possible.

    One amount is added to all shares, found by bisection, before rounding down and clipping: it
    completes the rounding by largest remainder, and spreads evenly what clipped heads cannot
    take. Equal remainders go to the first heads. Shares stay below 2**23.
    """
    fixed = jnp.round(shares * _PARTS).astype(jnp.int32)
    reach = jnp.int32(2**29)

    def rounded(added: Array) -> Array:
        return jnp.clip((fixed + added[:, None]) // _PARTS, low, high)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        short, enough = bounds
        middle = short + (enough - short) // 2
        reached = jnp.sum(rounded(middle), axis=1) >= total
        return jnp.where(reached, short, middle), jnp.where(reached, middle, enough)

    start = (jnp.full_like(total, -reach), jnp.full_like(total, reach))
    short, enough = lax.fori_loop(0, 31, halve, start)
    return _fill(rounded(short), rounded(enough), total)


def _fill(
    least: Int[Array, "B N"], most: Int[Array, "B N"], total: Int[Array, " B"]
) -> Int[Array, "B N"]:
    """`least` plus what is missing to `total`, taken from `most - least` of the first heads."""
    extra = most - least
    earlier = jnp.cumsum(extra, axis=1, dtype=jnp.int32) - extra
    room = (total - jnp.sum(least, axis=1))[:, None]
    return least + jnp.clip(room - earlier, 0, extra)


def check_ceiling(ceiling: float | None) -> None:
    if ceiling is not None and not ceiling >= 1:
        raise ValueError(f"ceiling={ceiling}: allowed are numbers >= 1, or None")


def ceiling_entries(ceiling: float | None, budget: Int[Array, " B"]) -> Int[Array, " B"]:
    """The most entries of a head: `ceiling` times the budget; no limit for None."""
    if ceiling is None:
        return jnp.full_like(budget, 2**30)
    return jnp.ceil(ceiling * budget.astype(jnp.float32)).astype(jnp.int32)


def largest_under(ceiling: float | None, budget: int, otherwise: int) -> int:
    """The same for a budget that is known, `otherwise` where nothing else limits."""
    return otherwise if ceiling is None else min(otherwise, math.ceil(ceiling * budget))
