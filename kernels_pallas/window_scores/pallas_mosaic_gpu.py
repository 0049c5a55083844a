"""Window scores on Hopper GPUs: two sweeps over the keys, the logits never leave the chip.

A softmax needs every logit's normaliser before weights can be added up over queries. The first
kernel leaves each row's largest logit and sum per part of the slots, which a few XLA operations
combine into one log-sum-exp per row; the second makes the weights and reduces them. Parts fill
the card where batch x KV heads do not.

Per slot and KV head, with D x item size = d, that reads 2 d bytes of keys (the second d from the
50 MB of L2 where a layer's keys fit there: 24k tokens of Llama-3.1-8B in bfloat16), 8 of
positions, and writes 4 (4 G without group reduction). FLOPs: 4 G W D for the products of both
sweeps, and 2 G W exponentials. One sweep that keeps the logits would move 8 G W bytes per slot
instead of d. Products of float32 operands are in tf32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.blocks import pad_to
from kernels_pallas.partition import partitioned
from kernels_pallas.window_scores.pallas_mosaic_gpu_sweeps import (
    LOW,
    ROW_TILE,
    Combine,
    Reduce,
    block_bytes,
    normalisers,
    reductions,
    shared_bytes,
)
from kernels_pallas.window_scores.reference import OverGroup, OverQueries
from kernels_pallas.window_scores.rows import Rows, moment_shares, rows_of, score_shares

# Of the 227 KiB, 4 left for barriers and alignment. Better two programs on a multiprocessor, whose
# exponentials and products overlap, than one.
_SMEM_BYTES = (109 * 1024, 223 * 1024)
_PROGRAMS = 264  # about two per multiprocessor of an H100 or H200


@partitioned("B H W D, B K S D, B W, B K S, B W -> B N S")
def window_scores(
    queries: Float[Array, "B H W D"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B W"],
    positions: Int[Array, "B K S"],
    query_weights: Float[Array, "B W"] | None = None,
    *,
    over_queries: OverQueries = "mean",
    over_group: OverGroup = "mean",
    window: int | Int[Array, ""] | None = None,
) -> Float[Array, "B N S"]:
    """As the reference."""
    rows, chunk = _rows(queries, keys, query_positions, window)
    share = score_shares(
        query_positions, query_weights, rows, over_queries=over_queries, over_group=over_group
    )

    def reduce(weights: Array, logs: Array, shares: Sequence[Array]) -> Sequence[Array]:
        del logs
        weighted = weights * shares[0]
        return [jnp.max(weighted, axis=1) if over_queries == "max" else jnp.sum(weighted, axis=1)]

    (scores,) = _two_sweeps(
        rows,
        chunk,
        keys,
        positions,
        share[:, None],
        reduce,
        over_chunks=jnp.maximum if over_queries == "max" else jnp.add,
        over_heads={"max": jnp.maximum, "sum": jnp.add, "mean": jnp.add, None: None}[over_group],
        kinds=1,
    )
    return scores.reshape(keys.shape[0], -1, keys.shape[2])


@partitioned("B H W D, B K S D, B W, B K S -> B H S, B H S, B H S")
def window_moments(
    queries: Float[Array, "B H W D"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B W"],
    positions: Int[Array, "B K S"],
    *,
    window: int | Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B H S"], Float[Array, "B H S"], Float[Array, "B H S"]]:
    """As the reference; the three leave one sweep, and write 12 G bytes per slot and KV head."""
    rows, chunk = _rows(queries, keys, query_positions, window)
    if rows.width != chunk:
        raise NotImplementedError(f"moments over {rows.width} queries: allowed are {ROW_TILE}")
    shares = jnp.stack(moment_shares(query_positions, rows), axis=1)

    def reduce(weights: Array, logs: Array, shares: Sequence[Array]) -> Sequence[Array]:
        mean = jnp.sum(weights * shares[0], axis=1)
        distance = weights - lax.broadcast_in_dim(mean, weights.shape, [0])
        variance = jnp.sum(distance * distance * shares[1], axis=1)
        return [mean, variance, -jnp.sum(weights * logs, axis=1)]

    shape = (keys.shape[0], queries.shape[1], keys.shape[2])
    mean, variance, entropy = _two_sweeps(
        rows, chunk, keys, positions, shares, reduce, over_chunks=jnp.add, over_heads=None, kinds=3
    )
    return mean.reshape(shape), variance.reshape(shape), entropy.reshape(shape)


def _rows(queries: Array, keys: Array, query_positions: Array, window: Any) -> tuple[Rows, int]:
    """The rows, and how many of one query head the second sweep takes at a time."""
    if queries.dtype != keys.dtype or keys.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"queries of {queries.dtype} and keys of {keys.dtype}: allowed are both bfloat16 or "
            "both float32"
        )
    if keys.shape[3] * keys.dtype.itemsize % 32:
        raise NotImplementedError(
            f"head size {keys.shape[3]} of {keys.dtype}: allowed are multiples of 32 bytes"
        )
    count = queries.shape[2]
    multiple = 8 if count <= ROW_TILE else ROW_TILE
    rows = rows_of(queries, query_positions, keys.shape[1], window, multiple=multiple)
    return rows, min(rows.width, ROW_TILE)


def _two_sweeps(
    rows: Rows,
    chunk: int,
    keys: Float[Array, "B K S D"],
    positions: Int[Array, "B K S"],
    shares: Float[Array, "B C R"],
    reduce: Reduce,
    *,
    over_chunks: Combine,
    over_heads: Combine | None,
    kinds: int,
) -> list[Float[Array, "BK N S"]]:
    """The `kinds` results of `reduce`, combined over a head's chunks of rows and over heads.

    Without `over_heads` N = G, else 1.
    """
    batch, kv_heads, slots, head_dim = keys.shape
    heads = batch * kv_heads
    outputs = kinds * (1 if over_heads is not None else rows.groups)
    fits = []
    for smem_bytes in _SMEM_BYTES:
        for block in (128, 64):
            fixed = shared_bytes(rows, keys.dtype, shares.shape[1], outputs, block)
            fits.append((block, (smem_bytes - fixed) // block_bytes(keys, block)))
    served = [(block, steps) for block, steps in fits if steps >= 2]
    if not served:
        raise NotImplementedError(
            f"{rows.groups} heads x {rows.width} queries of size {head_dim} in {keys.dtype} share "
            f"a KV head: allowed are {_SMEM_BYTES[-1] // 1024} KiB of shared memory for them, "
            "their results and two blocks of keys"
        )
    block, steps = served[0][0], min(served[0][1], 4)
    blocks = pl.cdiv(slots, block)
    parts = min(max(_PROGRAMS // heads, 1), blocks)
    per_part = pl.cdiv(blocks, parts)
    parts = pl.cdiv(blocks, per_part)

    # Tiled copies take whole tiles of 8 slots of an array.
    keys = pad_to(keys.reshape(heads, slots, head_dim), 8, 1)
    # Copies read zeros behind the end of the keys, and zero is a position.
    held = pad_to(positions.reshape(heads, slots), per_part * parts * block, 1, fill=-1)
    layout = (block, steps, per_part, parts)
    largest, total = normalisers(rows, keys, held, kv_heads, layout)
    top = jnp.max(largest, axis=1)
    summed = jnp.sum(total * jnp.exp2(largest - top[:, None]), axis=1)
    # Rows that saw nothing summed exp2(0) instead of 0.
    offset = jnp.where(top > LOW / 2, top + jnp.log2(jnp.maximum(summed, 1e-30)), -LOW)

    count = outputs // kinds
    out = reductions(
        rows,
        chunk,
        keys,
        held,
        kv_heads,
        layout,
        offset,
        shares,
        reduce,
        over_chunks=over_chunks,
        over_heads=over_heads,
        kinds=kinds,
    )
    return [out[:, kind * count : (kind + 1) * count, :slots] for kind in range(kinds)]
