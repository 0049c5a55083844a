"""Pooled maximum in blocks of queries and keys: memory linear in T and S, unseen blocks skipped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.blocks import pad_to
from kernels_pallas.pooled_max.pairs import Rule, Tensors, all_scores
from kernels_pallas.retention_attention.segments import Tokens, visible, visible_ranges

_NOBODY = 2**30


def pooled_max(
    rule: Rule,
    tensors: Tensors,
    asking: Tokens,
    held: Tokens,
    *,
    query_block: int = 128,
    key_block: int = 128,
) -> tuple[Float[Array, "B S"], Int[Array, "B S"]]:
    """As the reference. Forward only: the key loop's length is data."""
    batch, slots = held.positions.shape
    query_block = min(query_block, tensors.queries.shape[2])
    key_block = min(key_block, slots)
    keys = pad_to(tensors.keys, key_block, 2)
    of_queries = (tensors.queries, tensors.weights, tensors.offsets)
    of_queries = jax.tree.map(lambda array: pad_to(array, query_block, 2), of_queries)
    asking, held = asking.padded(query_block), held.padded(key_block)
    first, last = visible_ranges(asking, held, query_block, key_block)

    def query_step(
        found: tuple[Array, Array], block: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], None]:
        start, first, last = block
        queries, weights, offsets = jax.tree.map(
            lambda array: lax.dynamic_slice_in_dim(array, start, query_block, axis=2), of_queries
        )
        asked = asking.part(start, query_block)
        row = start + jnp.arange(query_block, dtype=jnp.int32)[None, :, None]

        def key_step(index: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
            at = index * key_block
            k = lax.dynamic_slice_in_dim(keys, at, key_block, axis=2)
            seen = visible(asked, held.part(at, key_block))
            scores = all_scores(rule, Tensors(queries, k, weights, offsets))
            scores = jnp.where(seen, scores, -jnp.inf)
            largest = jnp.max(scores, axis=1)
            # Faster than argmax, whose reduction of pairs XLA's CPU compiler does not vectorise.
            is_largest = scores == largest[:, None]
            query = jnp.min(jnp.where(is_largest, row, _NOBODY), axis=1)
            before, old = (lax.dynamic_slice_in_dim(a, at, key_block, axis=1) for a in found)
            better = largest > before  # not equal: the earlier block's query stays
            return (
                lax.dynamic_update_slice_in_dim(found[0], jnp.maximum(before, largest), at, axis=1),
                lax.dynamic_update_slice_in_dim(
                    found[1], jnp.where(better, query, old), at, axis=1
                ),
            )

        return lax.fori_loop(first, last, key_step, found), None

    start = (
        jnp.full((batch, keys.shape[2]), -jnp.inf, jnp.float32),
        jnp.full((batch, keys.shape[2]), -1, jnp.int32),
    )
    starts = jnp.arange(0, asking.positions.shape[1], query_block, dtype=jnp.int32)
    with jax.named_scope("pooled_max"):
        (largest, query), _ = lax.scan(query_step, start, (starts, first, last))
    return largest[:, :slots], query[:, :slots]
