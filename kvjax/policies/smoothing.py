"""Smoothing of window attention: over its queries, and over neighbouring entries by drift."""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

type Temporal = Literal["ema", "mean", "last"]
type Rule = Literal["clean", "released_code"]
type Carry = tuple[Array, Array, Array, Array, Array]


def query_weights(
    query_positions: Int[Array, "B W"], temporal: Temporal, alpha: float
) -> Float[Array, "B W"]:
    """Weight of each query row, oldest first, in an average over the window; they sum to 1.

    "ema" unrolls m_0 = A_0, m_i = alpha A_i + (1 - alpha) m_(i-1) into fixed weights:
    alpha (1 - alpha)^age, and (1 - alpha)^age for the oldest row. "mean" weighs the rows alike,
    "last" takes the newest. Rows of position -1 weigh nothing.
    """
    present = query_positions >= 0
    newer = jnp.cumsum(present[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]
    age = jnp.maximum(newer - 1, 0)
    count = jnp.sum(present, axis=1, keepdims=True, dtype=jnp.int32)
    if temporal == "last":
        weights = (age == 0).astype(jnp.float32)
    elif temporal == "mean":
        weights = jnp.broadcast_to(1.0 / jnp.maximum(count, 1).astype(jnp.float32), age.shape)
    else:
        decay = jnp.float32(1 - alpha) ** age.astype(jnp.float32)
        weights = jnp.where(age == count - 1, decay, alpha * decay)
    return jnp.where(present, weights, 0.0)


def slot_order(valid: Bool[Array, "B K S"]) -> Int[Array, "B K S"]:
    """The place of each entry among the valid entries of its head."""
    return jnp.maximum(jnp.cumsum(valid, axis=-1, dtype=jnp.int32) - 1, 0)


def mean_places(
    weights: Float[Array, "B H Q S"], order: Int[Array, "B K S"], count: Int[Array, " B"]
) -> Float[Array, "B H Q"]:
    """Mean place of the `count` largest weights of each query.

    `count` is data, so the largest weights are found by bisection on a threshold, until each
    row's last bracket holds at most count / 256 entries (below 512, one); these share the places
    that are left, which also settles ties. Weights below the smallest normal float32 are never
    among the largest.
    """
    batch, heads, queries, slots = weights.shape
    kv_heads = order.shape[1]
    weights = weights.reshape(batch, kv_heads, -1, slots)
    # Thresholds are halved as integers, in log scale: weights span many octaves.
    as_bits = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
    as_float = partial(lax.bitcast_convert_type, new_dtype=jnp.float32)

    def reaching(threshold: Int[Array, "B K R"]) -> Int[Array, "B K R"]:
        above = (weights >= as_float(threshold)[..., None]).astype(jnp.float32)
        return jnp.sum(above, axis=-1).astype(jnp.int32)

    tiny = jnp.full(weights.shape[:-1], as_bits(jnp.finfo(jnp.float32).tiny), jnp.int32)
    top = as_bits(jnp.max(weights, axis=-1))
    seen = reaching(tiny)
    wanted = jnp.minimum(jnp.maximum(count, 1)[:, None, None], seen)
    tolerance = jnp.maximum(wanted >> 8, 1)

    # Invariant: `low` is reached by at_low >= wanted weights, `high` by at_high < wanted.
    def unsettled(carry: Carry) -> Array:
        step, low, high, at_low, at_high = carry
        open_rows = (at_low != wanted) & (at_low - at_high > tolerance) & (high - low > 1)
        return (step < 30) & jnp.any(open_rows)

    def halve(carry: Carry) -> Carry:
        step, low, high, at_low, at_high = carry
        middle = low + (high - low) // 2
        at_middle = reaching(middle)
        enough = at_middle >= wanted
        return (
            step + 1,
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle),
            jnp.where(enough, at_middle, at_low),
            jnp.where(enough, at_high, at_middle),
        )

    # Most brackets start 16 octaves below the row's largest weight instead of at the bottom.
    floor = jnp.maximum(top - (16 << 23), tiny)
    at_floor = reaching(floor)
    deep = at_floor < wanted
    start = (
        jnp.int32(0),
        jnp.where(deep, tiny, floor),
        jnp.where(deep, floor, top + 1),
        jnp.where(deep, seen, at_floor),
        jnp.where(deep, at_floor, 0),
    )
    _, low, high, at_low, at_high = lax.while_loop(unsettled, halve, start)
    between = jnp.maximum(at_low - at_high, 1).astype(jnp.float32)
    share = (wanted - at_high).astype(jnp.float32) / between
    taken = jnp.where(weights >= as_float(low)[..., None], share[..., None], 0.0)
    taken = jnp.where(weights >= as_float(high)[..., None], 1.0, taken)
    places = order.astype(jnp.float32)[..., None]
    total = jnp.matmul(taken, places, precision="highest")[..., 0]
    mean = total / jnp.maximum(wanted, 1).astype(jnp.float32)
    return mean.reshape(batch, heads, queries)


def attention_drift(
    places: Float[Array, "B H W"], query_positions: Int[Array, "B W"]
) -> Float[Array, "B H"]:
    """How far attention moves to earlier entries from the older half of the queries to the newer.

    D_front - D_rear, each the mean of `mean_places` over the rows of a half of the window.
    Positive: the newer queries look at earlier entries. 0 for a single query.
    """
    present = query_positions >= 0
    number = jnp.cumsum(present, axis=1, dtype=jnp.int32)
    half = number[:, -1:] // 2
    front = present & (number <= half)
    rear = present & (number > half)

    def average(rows: Array) -> Array:
        share = rows.astype(jnp.float32)
        share = share / jnp.maximum(jnp.sum(share, axis=1, keepdims=True), 1.0)
        return jnp.sum(places * share[:, None], axis=-1)

    return jnp.where(half > 0, average(front) - average(rear), 0.0)


def drift_kernel(
    drift: Float[Array, "B N"], beta: Float[Array, "B N"], k_min: int, rule: Rule
) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    """Width and shift of the averaging window.

    width = max(k_min, 2 floor(|drift| / beta) + 1). shift = trunc(drift / beta) under "clean";
    "released_code" takes the floor and adds 1 unless drift > 0, which moves a drift of exactly 0
    by one entry.
    """
    ratio = drift / beta
    width = jnp.maximum(k_min, 2 * jnp.floor(jnp.abs(ratio)).astype(jnp.int32) + 1)
    if rule == "released_code":
        shift = jnp.floor(ratio) + jnp.where(drift > 0, 0.0, 1.0)
    else:
        shift = jnp.trunc(ratio)
    return width, shift.astype(jnp.int32)


def shifted_average(
    scores: Float[Array, "B N S"],
    entries: Bool[Array, "B N S"],
    width: Int[Array, "B N"],
    shift: Int[Array, "B N"],
    reach: int,
) -> Float[Array, "B N S"]:
    """out[i] = mean of s[i + shift - width // 2 .. i + shift + width // 2], ends repeated.

    Only `entries` count, as if they were contiguous. `reach` bounds |shift| + width // 2. Terms
    are added one offset at a time: scores span six decades, and differences of prefix sums would
    cancel.
    """
    slots = scores.shape[-1]
    place = jnp.cumsum(entries, axis=-1, dtype=jnp.int32) - 1
    last = place[..., -1:]
    rows = (jnp.arange(scores.shape[0])[:, None, None], jnp.arange(scores.shape[1])[None, :, None])
    target = jnp.where(entries, place, slots)
    packed = jnp.zeros_like(scores).at[(*rows, target)].set(scores, mode="drop")
    end = jnp.take_along_axis(packed, jnp.maximum(last, 0), axis=-1)
    packed = jnp.where(jnp.arange(slots)[None, None] > last, end, packed)
    padded = jnp.pad(packed, ((0, 0), (0, 0), (reach, reach)), mode="edge")

    def add(step: Array, total: Array) -> Array:
        offset = step - reach
        inside = jnp.abs(offset - shift) <= width // 2
        term = lax.dynamic_slice_in_dim(padded, step, slots, axis=-1)
        return total + jnp.where(inside[..., None], term, 0.0)

    total = lax.fori_loop(0, 2 * reach + 1, add, jnp.zeros_like(scores), unroll=reach <= 4)
    average = total / width.astype(jnp.float32)[..., None]
    back = jnp.take_along_axis(average, jnp.maximum(place, 0), axis=-1)
    return jnp.where(entries, back, 0.0)
