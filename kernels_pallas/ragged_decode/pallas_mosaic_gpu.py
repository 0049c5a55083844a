"""Decode attention on Hopper: flash-decoding over chunks of each head's slots.

A block of threads (one warpgroup) takes one chunk of one KV head: blocks of 64 slots come by TMA,
`stages` of them in flight, are multiplied with the head's rows by wgmma, and leave a partial output
and log-sum-exp; a few XLA operations merge the chunks (`partials.merge`). Blocks behind a head's
length are not read. Of padded and paged caches only the addresses differ.

Per slot and KV head that is 2 D elements of K and V and one position read (516 bytes at D 128,
bfloat16), 4 D R FLOPs for R = G * Q rows. Partial results add (D + 1) * 4 bytes per row and chunk,
written and read once. wgmma computes 64 rows where a decode step has G: its 2 * 64 * 64 * D
multiplications per block take 512 cycles of a tensor core at D 128, the softmax of the 64 x 64
logits about as many of the vector units, and the block's 32 KiB take 1600 cycles at an SM's share
of H200's 4.8 TB/s. Two blocks of threads share an SM (shared memory is sized for that in bfloat16),
so that one computes while the other's copies fly.

float32 operands are each split in two bfloat16 parts, hi + lo, and a product is hi hi + hi lo +
lo hi: relative error 2^-16 (wgmma's own float32 rounds to tf32 and does not take V as it lies).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.mask import NO_WINDOW
from kernels_pallas.partition import partitioned
from kernels_pallas.ragged_decode import partials, reference, rows
from kernels_pallas.ragged_decode.gradient import gradient_of
from kernels_pallas.ragged_decode.mosaic_gpu_cache import BLOCK, Cache, padded, paged
from kernels_pallas.ragged_decode.mosaic_gpu_kernel import attend
from kernels_pallas.ragged_decode.mosaic_gpu_shared import ROWS, Shared

_PAGES = "B H Q D, B pages P D, B pages P D, B pages P"  # heads share them


@gradient_of(reference.decode_attention)
@partitioned("B H Q D, B K S D, B K S D, B Q, B K S, B K, -> B H Q D, B H Q")
def decode_attention(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    lengths: Int[Array, "B K"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """As the reference."""
    cache = padded(keys, values, key_positions)
    out, lse, _ = _attend(queries, cache, query_positions, lengths, window, with_logits=False)
    return out, lse


@partitioned("B H Q D, B K S D, B K S D, B Q, B K S, B K, B H Q, -> B H Q D, B H Q, B H S")
def decode_mass(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    lengths: Int[Array, "B K"],
    others: Float[Array, "B H Q"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"], Float[Array, "B H S"]]:
    """As the reference."""
    cache = padded(keys, values, key_positions)
    out, lse, logits = _attend(queries, cache, query_positions, lengths, window, with_logits=True)
    return out, lse, partials.mass(logits, partials.total(lse, others))


@gradient_of(reference.paged_attention)
@partitioned(f"{_PAGES}, B K M, B K, B Q, -> B H Q D, B H Q")
def paged_attention(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B N P D"],
    values: Float[Array, "B N P D"],
    positions: Int[Array, "B N P"],
    page_table: Int[Array, "B K M"],
    lengths: Int[Array, "B K"],
    query_positions: Int[Array, "B Q"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """As the reference."""
    cache = paged(keys, values, positions, page_table, lengths)
    out, lse, _ = _attend(queries, cache, query_positions, lengths, window, with_logits=False)
    return out, lse


@partitioned(f"{_PAGES}, B K M, B K, B Q, B H Q, -> B H Q D, B H Q, B H S")
def paged_mass(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B N P D"],
    values: Float[Array, "B N P D"],
    positions: Int[Array, "B N P"],
    page_table: Int[Array, "B K M"],
    lengths: Int[Array, "B K"],
    query_positions: Int[Array, "B Q"],
    others: Float[Array, "B H Q"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"], Float[Array, "B H S"]]:
    """As the reference."""
    cache = paged(keys, values, positions, page_table, lengths)
    out, lse, logits = _attend(queries, cache, query_positions, lengths, window, with_logits=True)
    return out, lse, partials.mass(logits, partials.total(lse, others))


def _attend(
    queries: Float[Array, "B H Q D"],
    cache: Cache,
    query_positions: Int[Array, "B Q"],
    lengths: Int[Array, "B K"],
    window: int | Int[Array, ""],
    *,
    with_logits: bool,
) -> tuple[Array, Array, Any]:
    (batch, heads, count, size), kv_heads = queries.shape, lengths.shape[1]
    dtype = cache.keys.dtype
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) or queries.dtype != dtype:
        raise NotImplementedError(
            f"queries in {queries.dtype} over keys in {dtype}: allowed are bfloat16, float16 and "
            "float32, the same for both"
        )
    if size % 16 or size > 128:
        raise NotImplementedError(f"head size {size}: allowed are multiples of 16 up to 128")
    wanted = heads // kv_heads * count
    if with_logits and wanted > 8:
        raise NotImplementedError(
            f"logits of {wanted} queries per KV head: allowed are up to 8, beyond that a second "
            "pass over the keys moves fewer bytes"
        )
    shape = Shared(
        size=size,
        dtype=dtype,
        tile_rows=8 * -(-wanted // 8) if wanted <= ROWS else ROWS,
        with_logits=with_logits,
    )
    grouped = rows.query_rows(queries, kv_heads, shape.tile_rows)
    tiles = grouped.shape[2] // shape.tile_rows
    newest, oldest = rows.row_ranges(query_positions, heads // kv_heads, window, ROWS)
    split = jnp.stack(shape.split(grouped.reshape(batch * kv_heads, -1, size)), axis=1)
    results = attend(
        shape, split, cache, newest, oldest, lengths.reshape(-1), kv_heads=kv_heads, tiles=tiles
    )
    out, lse = partials.merge(*results[:2])
    out = out.reshape(batch, kv_heads, -1, size)
    result = rows.from_rows(out, lse.reshape(batch, kv_heads, -1), queries)
    if not with_logits:
        return *result, None
    written = results[2][:, :wanted].reshape(batch, kv_heads, wanted, -1)
    if cache.table is None and not cache.whole_heads:
        at = cache.logit_columns(batch * kv_heads).reshape(batch, kv_heads, 1, -1)
        written = jnp.take_along_axis(written, at, axis=3)
    elif cache.table is None and cache.slots % BLOCK:
        # The last block ends with the slots, and its first columns belong to the one before.
        before = cache.slots // BLOCK * BLOCK
        last = written[..., 2 * before + BLOCK - cache.slots :]
        written = jnp.concatenate([written[..., :before], last], axis=3)
    return *result, rows.logits_from_rows(written, lengths, heads, cache.slots)
