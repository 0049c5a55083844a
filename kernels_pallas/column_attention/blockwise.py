"""Column statistics of attention in blocks: memory linear in Q and S, unseen blocks skipped.

XLA suffices for the memory: beside the results, one tile of weights of H x block^2 float32 is
alive (on CPU of all rows together), and the loops read every operand in place. It suffices for
the operations: with slots in position order a prompt of n blocks visits n (n + 1) / 2 tiles,
which is 1 + 1 / n times what the causal half needs, at 2 D FLOPs and one exponential per pair of
query and slot.

For the traffic it suffices on TPU, where the compiled program holds the tile (8 MiB for 32 heads
at block 256) in VMEM between the matrix product and the exponentials, and HBM sees D x item size
/ block bytes per pair, of keys. On GPU product, exponentials and sums are three programs: logits
and weights are written and read, 16 bytes per pair through L2. There `pallas_mosaic_gpu` is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.blocks import block_bounds, pad_to, visible_range
from kernels_pallas.attention.mask import NO_WINDOW
from kernels_pallas.column_attention.reference import Statistic, column_weights
from kernels_pallas.dispatch import KERNELS, platform

# Accumulators of some slots, and what one tile adds to them.
type Accumulators = tuple[Float[Array, "..."], ...]


def column_attention(
    queries: Float[Array, "B H Q D"],
    lse: Float[Array, "B H Q"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    window: int | Int[Array, ""] = NO_WINDOW,
    *,
    statistic: Statistic = "sum",
    block: int = 256,
) -> Float[Array, "B H S"]:
    """As the reference, one (query block, key block) tile at a time."""
    batch, heads, _, _ = queries.shape
    slots = keys.shape[2]
    query_block, key_block = min(block, queries.shape[2]), min(block, slots)
    queries = pad_to(queries, query_block, 2)
    lse = pad_to(lse, query_block, 2)
    query_positions = pad_to(query_positions, query_block, 1, fill=-1)
    keys = pad_to(keys, key_block, 2)
    key_positions = pad_to(key_positions, key_block, 2, fill=-1)
    parts, add, finish = _STATISTICS[statistic]

    def visited(row: Array, rows: int) -> Accumulators:
        def cut(array: Array, at: Array, size: int, axis: int = 2) -> Array:
            starts = [row, *[jnp.zeros_like(row)] * (array.ndim - 1)]
            starts[axis] = at.astype(row.dtype)
            sizes = [rows, *array.shape[1:]]
            sizes[axis] = size
            return lax.dynamic_slice(array, starts, sizes)

        bounds = block_bounds(cut(key_positions, jnp.int32(0), keys.shape[2]), key_block)

        def query_step(found: Accumulators, start: Array) -> tuple[Accumulators, None]:
            q, row_lse = cut(queries, start, query_block), cut(lse, start, query_block)
            positions = cut(query_positions, start, query_block, axis=1)

            def key_step(index: Array, found: Accumulators) -> Accumulators:
                at = index * key_block
                k, slot = cut(keys, at, key_block), cut(key_positions, at, key_block)
                weights, seen = column_weights(q, row_lse, k, positions, slot, window)
                old = tuple(lax.dynamic_slice_in_dim(a, at, key_block, axis=2) for a in found)
                new = add(old, weights, seen)
                return tuple(
                    lax.dynamic_update_slice_in_dim(a, n, at, axis=2)
                    for a, n in zip(found, new, strict=True)
                )

            first, last = visible_range(bounds, positions, window)
            return lax.fori_loop(first, last, key_step, found), None

        zeros = jnp.zeros((rows, heads, keys.shape[2]), jnp.float32)
        starts = jnp.arange(0, queries.shape[2], query_block, dtype=jnp.int32)
        return lax.scan(query_step, (zeros,) * parts, starts)[0]

    if batch > 1 and platform() in KERNELS:
        # Row by row, so that the tile fits in VMEM or L2 whatever the batch.
        each = jnp.arange(batch, dtype=jnp.int32)
        found = tuple(a[:, 0] for a in lax.map(lambda row: visited(row, 1), each))
    else:
        found = visited(jnp.int32(0), batch)
    return finish(found)[:, :, :slots]


def _flat(by_group: Float[Array, "B K G S"]) -> Float[Array, "B H S"]:
    return by_group.reshape(by_group.shape[0], -1, by_group.shape[3])


def _queries_that_see(seen: Array, like: Float[Array, "B H S"]) -> Float[Array, "B H S"]:
    count = jnp.sum(seen, axis=3, dtype=jnp.int32).astype(jnp.float32)
    by_head = jnp.broadcast_to(
        count, (*count.shape[:2], like.shape[1] // count.shape[1], like.shape[2])
    )
    return _flat(by_head)


def _add_sum(old: Accumulators, weights: Array, seen: Array) -> Accumulators:
    del seen
    return (old[0] + _flat(jnp.sum(weights, axis=3)),)


def _add_max(old: Accumulators, weights: Array, seen: Array) -> Accumulators:
    del seen
    return (jnp.maximum(old[0], _flat(jnp.max(weights, axis=3))),)


def _add_mean(old: Accumulators, weights: Array, seen: Array) -> Accumulators:
    total = _flat(jnp.sum(weights, axis=3))
    return old[0] + total, old[1] + _queries_that_see(seen, total)


def _add_variance(old: Accumulators, weights: Array, seen: Array) -> Accumulators:
    """Chan's merge of (mean, sum of squared distances, count), which does not cancel."""
    mean, squares, count = old
    total = _flat(jnp.sum(weights, axis=3))
    more = _queries_that_see(seen, total)
    own = total / jnp.maximum(more, 1.0)
    distance = weights - own.reshape(*weights.shape[:3], 1, -1)
    added = _flat(jnp.sum(jnp.where(seen, jnp.square(distance), 0.0), axis=3))
    both = jnp.maximum(count + more, 1.0)
    apart = own - mean
    squares = squares + added + jnp.square(apart) * (count * more / both)
    return mean + apart * (more / both), squares, count + more


def _sum(found: Accumulators) -> Float[Array, "B H S"]:
    return found[0]


def _mean(found: Accumulators) -> Float[Array, "B H S"]:
    return found[0] / jnp.maximum(found[1], 1.0)


def _variance(found: Accumulators) -> Float[Array, "B H S"]:
    return found[1] / jnp.maximum(found[2] - 1.0, 1.0)


_STATISTICS: dict[Statistic, tuple[int, Callable[..., Accumulators], Callable[..., Any]]] = {
    "sum": (1, _add_sum, _sum),
    "max": (1, _add_max, _sum),
    "mean": (2, _add_mean, _mean),
    "variance": (3, _add_variance, _variance),
}
