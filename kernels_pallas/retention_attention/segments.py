"""Which tokens of packed documents see each other, and which blocks of them can be skipped."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from kernels_pallas.attention import mask
from kernels_pallas.attention.blocks import pad_to


class Tokens(NamedTuple):
    """Index in its row and segment of each token; -1 in both for what is not there."""

    positions: Int[Array, "*b T"]
    segments: Int[Array, "*b T"]

    def padded(self, multiple: int) -> Tokens:
        """Absent tokens added at the end, up to a multiple of `multiple`."""
        axis = self.segments.ndim - 1
        return Tokens(*(pad_to(array, multiple, axis, fill=-1) for array in self))

    def part(self, at: Int[Array, ""], block: int) -> Tokens:
        """The block of tokens [B, block] from `at`."""
        return Tokens(*(lax.dynamic_slice_in_dim(array, at, block, axis=1) for array in self))

    def blocks(self, block: int) -> Tokens:
        """All blocks stacked: [N, B, block]."""
        return Tokens(*(jnp.moveaxis(a.reshape(a.shape[0], -1, block), 1, 0) for a in self))


def tokens(segments: Int[Array, "B T"]) -> Tokens:
    """Every token of packed rows: position is index, negative segments are padding."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)
    there = segments >= 0
    return Tokens(
        jnp.where(there, index[None], -1), jnp.where(there, segments, -1).astype(jnp.int32)
    )


def visible(
    queries: Tokens, keys: Tokens, window: int | Int[Array, ""] = mask.NO_WINDOW
) -> Bool[Array, "*b Q S"]:
    """Attention's rule, and both tokens lie in one segment.

    Segments 0 0 1 1 -1 without a window: 1 sees 0 and 1, 2 sees 2, 3 sees 2 and 3, 4 nothing.
    """
    same = queries.segments[..., :, None] == keys.segments[..., None, :]
    return same & mask.visible(queries.positions, keys.positions, window)


def visible_ranges(
    queries: Tokens,
    keys: Tokens,
    query_block: int,
    key_block: int,
    window: int | Int[Array, ""] = mask.NO_WINDOW,
) -> tuple[Int[Array, " N"], Int[Array, " N"]]:
    """First and one past the last key block that any row needs, for each block of queries.

    Ahead of the loop over blocks and many at a time: the union of a sharded batch's rows is a
    collective, while all pairs of blocks at once would be memory quadratic in T.
    """
    first_key, last_key = _bounds(keys.positions, key_block)
    low_key, high_key = _bounds(keys.segments, key_block)

    def visible_range(
        block: tuple[tuple[Array, Array], tuple[Array, Array]],
    ) -> tuple[Array, Array]:
        (oldest, newest), (low, high) = ((a[:, None], b[:, None]) for a, b in block)
        # Blocks with nobody in them have bounds (2**30, -1) and meet no other.
        near = (first_key <= newest) & (last_key > jnp.minimum(oldest, newest) - window)
        seen = jnp.any(near & (low_key <= high) & (high_key >= low), axis=0)
        first = jnp.argmax(seen).astype(jnp.int32)
        last = seen.shape[0] - jnp.argmax(seen[::-1]).astype(jnp.int32)
        return first, jnp.where(jnp.any(seen), last, first)

    bounds = [_bounds(array, query_block) for array in queries]
    stacked = jax.tree.map(lambda array: array.T, tuple(bounds))
    return lax.map(visible_range, stacked, batch_size=64)


def _bounds(numbers: Int[Array, "B T"], block: int) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    blocks = numbers.reshape(numbers.shape[0], -1, block)
    smallest = jnp.min(jnp.where(blocks >= 0, blocks, 2**30), axis=2)
    return smallest, jnp.max(blocks, axis=2)
