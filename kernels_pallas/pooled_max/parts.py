"""What the kernels of the pooled maximum share: rows to work on, ranges of blocks, joined parts."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.pooled_max.pairs import Rule, Tensors
from kernels_pallas.retention_attention.segments import Tokens

NOBODY = 2**30
# Of a Rule, Tensors and two times Tokens. (A maximum or sum over heads needs all of them.)
AXES = ", , , B H T D, B K S D, B H T, B H T, B T, B T, B S, B S -> B S, B S"


class Rows(NamedTuple):
    """Independent problems, several per row of the batch."""

    tensors: Tensors  # their leading axis is R = B x share
    share: int  # rows that one row of the batch became


def rows(rule: Rule, tensors: Tensors) -> Rows:
    """A maximum over heads is taken of each KV head's queries first, so that its keys stay put.

    No copy: [B, K G, T, D] becomes [B K, G, T, D]. A sum needs all heads of a query at once.
    """
    queries, keys, weights, offsets = tensors
    batch, kv_heads, slots, size = keys.shape
    if rule.reduce == "sum" or kv_heads == 1:
        return Rows(tensors, 1)

    def fold(array: Array | None) -> Array | None:
        return None if array is None else array.reshape(batch * kv_heads, -1, *array.shape[2:])

    apart = Tensors(
        queries.reshape(batch * kv_heads, -1, *queries.shape[2:]),
        keys.reshape(batch * kv_heads, 1, slots, size),
        fold(weights),
        fold(offsets),
    )
    return Rows(apart, kv_heads)


def query_ranges(
    asking: Tokens, held: Tokens, query_block: int, key_block: int
) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    """First and one past the last block of queries that may see each block of keys, per row.

    Both are padded to whole blocks. (0, 0) where nobody sees a block. The comparison of all pairs
    of blocks is part of the reductions over it and never an array.
    """
    newest = _blocks(asking.positions, query_block).max(axis=2)
    oldest = _least(held.positions, key_block)
    low_query, high_query = _spread(asking.segments, query_block)
    low_key, high_key = _spread(held.segments, key_block)

    def pairs(keys: Array, queries: Array) -> tuple[Array, Array]:
        return keys[:, :, None], queries[:, None, :]

    first, last = pairs(oldest, newest)  # blocks with nobody in them: 2**30 and -1
    low, high = pairs(low_key, high_query)
    under, over = pairs(high_key, low_query)
    seen = (first <= last) & (low <= high) & (under >= over)
    index = jnp.arange(newest.shape[1], dtype=jnp.int32)[None, None]
    end = jnp.max(jnp.where(seen, index + 1, 0), axis=2)
    start = jnp.min(jnp.where(seen, index, NOBODY), axis=2)
    return jnp.minimum(start, end), end


def join(
    largest: Float[Array, "B P S"], query: Int[Array, "B P S"]
) -> tuple[Float[Array, "B S"], Int[Array, "B S"]]:
    """The largest of the parts' maxima and the first query that reaches it; -1 where it is -inf."""
    top = jnp.max(largest, axis=1)
    first = jnp.min(jnp.where(largest == top[:, None], query, NOBODY), axis=1)
    return top, jnp.where(top == -jnp.inf, -1, first)


def _blocks(numbers: Int[Array, "B T"], block: int) -> Int[Array, "B N {block}"]:
    return numbers.reshape(numbers.shape[0], -1, block)


def _least(numbers: Int[Array, "B T"], block: int) -> Int[Array, "B N"]:
    blocks = _blocks(numbers, block)
    return jnp.min(jnp.where(blocks >= 0, blocks, NOBODY), axis=2)


def _spread(numbers: Int[Array, "B T"], block: int) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    return _least(numbers, block), _blocks(numbers, block).max(axis=2)
