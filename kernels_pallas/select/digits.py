"""Selection by counting, digit by digit, for accelerators: no sort and no prefix sum.

A TPU takes single bits, 32 passes: over 16 MiB of keys at a time the compiler holds them in VMEM
from the first pass to the last, so that HBM is read once. A GPU takes digits of 3 bits, the most
whose counts one pass yields, so 11 passes: over 16 MiB of keys, which stay in its cache. Only
heads that compete with one another are never parted; where their keys are more, all passes read
HBM. Which of the keys equal to the threshold stay is found by counting too, over slots.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from kernels_pallas import dispatch
from kernels_pallas.partition import mesh_of, partitioned
from kernels_pallas.select.axes import axes
from kernels_pallas.select.order import order_key

_CACHED = 2**22  # keys of rows that are taken together: in VMEM, or in a GPU's cache


@partitioned(axes)
def keep_mask(
    scores: Float[Array, "*n S"],
    rank: Int[Array, "*n S"],
    valid: Bool[Array, "*n S"],
    budgets: Int[Array, "*n"],
) -> Bool[Array, "*n S"]:
    """As the reference."""
    slots = scores.shape[-1]

    def some(rows: tuple[Array, ...]) -> Bool[Array, "R S"]:
        return keep_largest(order_key(*rows[:3]), rows[3])

    flat = [array.reshape(-1, slots) for array in (scores, rank, valid)]
    return _by_groups(some, (*flat, budgets.reshape(-1))).reshape(scores.shape)


def keep_largest(key: UInt32[Array, "R S"], budgets: Int[Array, " R"]) -> Bool[Array, "R S"]:
    """As the reference, of one axis of rows."""
    budgets = budgets[:, None]
    digit = _digit(key)
    threshold = _largest(lambda least: _count(key >= least) >= budgets, budgets.shape, 32, digit)
    above, equal = key > threshold, (key == threshold) & (key > 0)
    room = budgets - _count(above)
    slot = lax.broadcasted_iota(jnp.uint32, key.shape, 1)

    def some_of_the_equal() -> UInt32[Array, "R 1"]:
        bits = key.shape[1].bit_length()
        return _largest(lambda end: _count(equal & (slot < end)) <= room, room.shape, bits, digit)

    none_left = jnp.full(room.shape, key.shape[1], jnp.uint32)
    end = lax.cond(jnp.any(_count(equal) > room), some_of_the_equal, lambda: none_left)
    return above | (equal & (slot < end))


def competing_threshold(
    keys: UInt32[Array, "B *n S"],
    total: Int[Array, " B"],
    low: Int[Array, "B *n"],
    high: Int[Array, "B *n"],
) -> UInt32[Array, " B"]:
    """As in `threshold`."""

    def some(rows: tuple[Array, ...]) -> UInt32[Array, " R"]:
        keys, total, low, high = rows

        def enough(threshold: UInt32[Array, " R"]) -> Bool[Array, " R"]:
            at_least = threshold.reshape(-1, *(1,) * (keys.ndim - 1))
            counts = jnp.clip(_count(keys >= at_least)[..., 0], low, high)
            return jnp.sum(counts, axis=tuple(range(1, counts.ndim))) >= total

        return _largest(enough, total.shape, 32, _digit(keys))

    arrays = (keys, total, low, high)
    # Over devices only counts are exchanged, if rows stay where they are.
    return _by_groups(some, arrays) if mesh_of(arrays) is None else some(arrays)


def _count(mask: Bool[Array, "*n S"]) -> Int[Array, "*n 1"]:
    return jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.int32)


def _digit(keys: Array) -> int:
    """Bits of a digit."""
    return 1 if dispatch.platform() == "tpu" and keys.size <= 4 * _CACHED else 3


def _largest(
    holds: Callable[[Array], Array], shape: tuple[int, ...], bits: int, size: int
) -> UInt32[Array, "..."]:
    """The largest number that `holds`, of digits of `size` bits; all smaller ones hold too."""
    steps = -(-bits // size)

    def add_digit(step: Array, found: Array) -> Array:
        shift = (jnp.int32(steps - 1) - step).astype(jnp.uint32) * size
        larger = jnp.zeros(shape, jnp.uint32)
        for digit in range(1, 2**size):
            shifted = jnp.uint32(digit) << shift
            fits = (shifted >> shift) == digit  # 32 bits are no multiple of 3
            larger = larger + (holds(found | shifted) & fits).astype(jnp.uint32)
        return found | (larger << shift)

    return lax.fori_loop(0, steps, add_digit, jnp.zeros(shape, jnp.uint32))


def _by_groups(function: Callable[[tuple[Array, ...]], Array], arrays: tuple[Array, ...]) -> Array:
    """`function` of all rows, of as many at a time as `_CACHED` keys are."""
    rows, size = arrays[0].shape[0], arrays[0].size // max(arrays[0].shape[0], 1)
    together = max(1, min(rows, _CACHED // max(size, 1)))
    while rows % together:
        together -= 1
    if together == rows:
        return function(arrays)
    groups = tuple(a.reshape(rows // together, together, *a.shape[1:]) for a in arrays)
    results = lax.map(function, groups)
    return results.reshape(rows, *results.shape[2:])
