"""Which tiles of a row's attention a kernel has to visit, and which of them need no mask."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from kernels_pallas.retention_attention.segments import tokens


class _Blocks(NamedTuple):
    """Bounds of each block's tokens, (2**30, -1) without any; uniform: one document, all there."""

    oldest: Int[Array, "*n"]
    newest: Int[Array, "*n"]
    lowest: Int[Array, "*n"]
    highest: Int[Array, "*n"]
    uniform: Bool[Array, "*n"]


def key_ranges(
    segments: Int[Array, "B T"], query_block: int, key_block: int, window: int | Int[Array, ""]
) -> Int[Array, "B N 4"]:
    """For each block of queries the key blocks (first, full_first, full_last, last) of its row.

    Tiles from `first` to before `last` may hold visible pairs; of those from `full_first` to
    before `full_last` every pair is visible, so that they need no mask. The latter are the whole
    tiles just below the diagonal, back to the document's start or the window's.
    """
    count = segments.shape[1] // key_block

    def of_row(queries: _Blocks, keys: _Blocks) -> Array:
        def of_block(block: tuple[Array, _Blocks]) -> Array:
            at, queries = block
            seen, full = _pairs(queries, keys, window)
            first, last = _ends(seen)
            index = jnp.arange(count, dtype=jnp.int32)
            below = at * query_block // key_block  # blocks that end before these queries begin
            gaps = jnp.where(~full & (index < below), index + 1, 0)
            full_last = jnp.clip(below, first, last)
            full_first = jnp.clip(jnp.max(gaps), first, full_last)
            return jnp.stack([first, full_first, full_last, last])

        blocks = jnp.arange(segments.shape[1] // query_block, dtype=jnp.int32)
        # Many at a time, but not all: that would be memory quadratic in T.
        return lax.map(of_block, (blocks, queries), batch_size=64)

    return jax.vmap(of_row)(_blocks(segments, query_block), _blocks(segments, key_block))


def query_ranges(
    segments: Int[Array, "B T"], query_block: int, key_block: int, window: int | Int[Array, ""]
) -> Int[Array, "B N 4"]:
    """`key_ranges` the other way round: for each block of keys its row's query blocks."""
    count = segments.shape[1] // query_block

    def of_row(queries: _Blocks, keys: _Blocks) -> Array:
        def of_block(block: tuple[Array, _Blocks]) -> Array:
            at, keys = block
            seen, full = _pairs(queries, keys, window)
            first, last = _ends(seen)
            index = jnp.arange(count, dtype=jnp.int32)
            below = ((at + 1) * key_block + query_block - 1) // query_block
            gaps = jnp.where(~full & (index >= below), index, count)
            full_first = jnp.clip(below, first, last)
            full_last = jnp.clip(jnp.min(gaps), full_first, last)
            return jnp.stack([first, full_first, full_last, last])

        blocks = jnp.arange(segments.shape[1] // key_block, dtype=jnp.int32)
        return lax.map(of_block, (blocks, keys), batch_size=64)

    return jax.vmap(of_row)(_blocks(segments, query_block), _blocks(segments, key_block))


def _blocks(segments: Int[Array, "B T"], block: int) -> _Blocks:
    positions, ids = (array.reshape(array.shape[0], -1, block) for array in tokens(segments))
    none = 2**30

    def bounds(numbers: Array) -> tuple[Array, Array]:
        return jnp.min(jnp.where(numbers >= 0, numbers, none), axis=2), jnp.max(numbers, axis=2)

    lowest, highest = bounds(ids)
    uniform = (lowest == highest) & (jnp.min(ids, axis=2) >= 0)
    return _Blocks(*bounds(positions), lowest, highest, uniform)


def _pairs(
    queries: _Blocks, keys: _Blocks, window: int | Int[Array, ""]
) -> tuple[Bool[Array, " N"], Bool[Array, " N"]]:
    """Which tiles may hold a visible pair, and which hold nothing else; one side is one block."""
    # The one block's numbers get the axis that the many have.
    queries, keys = (_Blocks(*(jnp.atleast_1d(a) for a in side)) for side in (queries, keys))
    near = (keys.oldest <= queries.newest) & (
        keys.newest > jnp.minimum(queries.oldest, queries.newest) - window
    )
    seen = near & (keys.lowest <= queries.highest) & (keys.highest >= queries.lowest)
    alike = queries.uniform & keys.uniform & (queries.lowest == keys.lowest)
    within = (keys.newest <= queries.oldest) & (keys.oldest > queries.newest - window)
    return seen, alike & within


def _ends(seen: Bool[Array, " N"]) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """First and one past the last that is set; (0, 0) of none."""
    first = jnp.argmax(seen).astype(jnp.int32)
    last = seen.shape[0] - jnp.argmax(seen[::-1]).astype(jnp.int32)
    return first, jnp.where(jnp.any(seen), last, first).astype(jnp.int32)
