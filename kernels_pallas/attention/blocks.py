"""Which key blocks a block of queries can see: what lets blockwise loops skip the rest."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int


def pad_to(array: Array, multiple: int, axis: int, fill: int = 0) -> Array:
    """`array` padded at the end of `axis` to a multiple of `multiple`."""
    short = -array.shape[axis] % multiple
    if short == 0:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, short)
    return jnp.pad(array, widths, constant_values=fill)


def block_bounds(
    positions: Int[Array, "*b S"], block: int
) -> tuple[Int[Array, " N"], Int[Array, " N"]]:
    """Smallest and largest valid position in each block of slots, over rows and heads.

    A block with no entry gets (2**30, -1), which no query sees.
    """
    blocks = positions.reshape(-1, positions.shape[-1] // block, block)
    smallest = jnp.min(jnp.where(blocks >= 0, blocks, 2**30), axis=(0, 2))
    return smallest, jnp.max(blocks, axis=(0, 2))


def visible_range(
    bounds: tuple[Int[Array, " N"], Int[Array, " N"]],
    query_positions: Int[Array, "B Q"],
    window: int | Int[Array, ""],
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """First and one past the last key block that any of these queries may see."""
    smallest, largest = bounds
    newest = jnp.max(query_positions)
    oldest = jnp.min(jnp.where(query_positions >= 0, query_positions, 2**30))
    seen = (smallest <= newest) & (largest > jnp.minimum(oldest, newest) - window)
    count = seen.shape[0]
    first = jnp.argmax(seen).astype(jnp.int32)
    last = count - jnp.argmax(seen[::-1]).astype(jnp.int32)
    return first, jnp.where(jnp.any(seen), last, first)
