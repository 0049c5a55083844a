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

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas import lowering
from kernels_pallas.attention.mask import NO_WINDOW
from kernels_pallas.ragged_decode import partials, rows
from kernels_pallas.ragged_decode.mosaic_gpu_cache import BLOCK, Cache, padded, paged
from kernels_pallas.ragged_decode.mosaic_gpu_shared import ROWS, Shared

_THREAD_BLOCKS = 2 * 2 * 132  # two waves of two on each SM of H200
_MOST_BLOCKS = 32  # in a chunk
_LOG2E = math.log2(math.e)


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
    if with_logits and cache.table is None and not cache.whole_heads:
        raise NotImplementedError(
            f"logits of {cache.slots} slots: allowed are multiples of 8 from {BLOCK} on"
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
    results = _call(
        shape, split, cache, newest, oldest, lengths.reshape(-1), kv_heads=kv_heads, tiles=tiles
    )
    out, lse = partials.merge(*results[:2])
    out = out.reshape(batch, kv_heads, -1, size)
    result = rows.from_rows(out, lse.reshape(batch, kv_heads, -1), queries)
    if not with_logits:
        return *result, None
    written = results[2][:, :wanted].reshape(batch, kv_heads, wanted, -1)
    if cache.table is None and cache.slots % BLOCK:
        # The last block ends with the slots, and its first columns belong to the one before.
        before = cache.slots // BLOCK * BLOCK
        last = written[..., 2 * before + BLOCK - cache.slots :]
        written = jnp.concatenate([written[..., :before], last], axis=3)
    return *result, rows.logits_from_rows(written, lengths, heads, cache.slots)


def _call(
    shape: Shared,
    queries: Array,  # [B * K, parts, R, D]
    cache: Cache,
    newest: Array,  # [B, R]
    oldest: Array,
    lengths: Array,  # [B * K]
    *,
    kv_heads: int,
    tiles: int,
) -> Sequence[Array]:
    heads, slots, in_pages = queries.shape[0], cache.slots, cache.table is not None
    # A head whose first row is no multiple of 8 starts up to 7 columns into its first block.
    stride = cache.positions.shape[0] // heads if in_pages else slots
    blocks = -(-(slots + (0 if in_pages or slots % 8 == 0 else 7)) // BLOCK)
    size, tile_rows, stages = shape.size, shape.tile_rows, shape.stages
    per_chunk = max(1, min(_MOST_BLOCKS, -(-blocks * heads * tiles // _THREAD_BLOCKS)))
    chunks = -(-blocks // per_chunk)
    copies = BLOCK // cache.rows_per_copy
    total_rows = cache.positions.shape[0]
    # Columns of V and of the output that are multiplied at a time: a thread has 255 registers.
    width = 64 if size % 64 == 0 else size
    columns = [pl.ds(first, width) for first in range(0, size, width)]
    by_row = plgpu.Layout.WGMMA.reduce(1)

    def across(x: Array, columns: int) -> Array:
        return lax.broadcast_in_dim(x, (ROWS, columns), (0,))

    def attend(*refs: Any) -> None:
        q_ref, k_ref, v_ref, at_ref, newest_ref, oldest_ref, length_ref, *refs_ = refs
        table_ref = refs_.pop(0) if cache.table is not None else None
        out_ref, lse_ref = refs_[:2]
        logits_ref = refs_[2] if shape.with_logits else None
        scratch = refs_[2 + shape.with_logits :]
        q_smem, shared, at_smem, p_smem, lse_smem, q_barrier, barriers, optional = scratch
        (k_smem, v_smem), out_smem = shared
        part_smem, logits_smem = optional
        chunk, head, tile = (lax.axis_index(name) for name in ("chunk", "head", "tile"))
        row, length = head // kv_heads, length_ref[head]
        base = head * stride  # the head's first row
        shift = lax.rem(base, jnp.int32(8))
        first = chunk * per_chunk
        number = jnp.minimum(first + per_chunk, (length + shift + BLOCK - 1) // BLOCK) - first
        limit = base + slots if cache.whole_heads and not in_pages else total_rows

        def begins(index: Array) -> Array:
            """The row at which block `index` of the chunk begins."""
            at = jnp.minimum(base - shift + (first + index) * BLOCK, limit - BLOCK)
            return pl.multiple_of(at, 8)

        def fetch(index: Array, stage: Any) -> None:
            at, barrier = begins(index), barriers.at[stage]
            plgpu.copy_gmem_to_smem(at_ref.at[pl.ds(at, BLOCK)], at_smem.at[stage], barrier)
            for copy in range(copies):
                row = at
                if table_ref is not None:
                    slot = (first + index) * BLOCK + copy * cache.rows_per_copy
                    slot = jnp.minimum(slot, slots - 1)
                    row = table_ref[head, slot // cache.page] + lax.rem(slot, jnp.int32(cache.page))
                source = pl.ds(pl.multiple_of(row, 8), cache.rows_per_copy)
                into = (stage, pl.ds(copy * cache.rows_per_copy, cache.rows_per_copy))
                plgpu.copy_gmem_to_smem(k_ref.at[source], k_smem.at[into], barrier)
                plgpu.copy_gmem_to_smem(v_ref.at[source], v_smem.at[into], barrier)

        def operands(fetched: Any) -> list[Any]:
            """What wgmma takes of a block that has come."""
            if part_smem is None:
                return [fetched]

            # A loop, not a row of copies: their addresses would take more registers than there are.
            @pl.loop(0, len(columns))
            def _(at: Array) -> None:
                some = pl.ds(pl.multiple_of(at * width, width), width)
                block = plgpu.load(fetched.at[:, some], layout=plgpu.Layout.WGMMA)
                for part, array in enumerate(shape.split(block)):
                    part_smem[part, :, some] = array

            plgpu.commit_smem()
            return [part_smem.at[part] for part in range(shape.parts)]

        def multiply(left: Any, right: Sequence[Any], columns: int) -> Array:
            def run(total: Any) -> Array:
                for a, b in shape.products:
                    plgpu.wgmma(total, left.at[a], right[b])
                return total[...]

            return pl.run_scoped(run, plgpu.ACC((ROWS, columns), jnp.float32))

        @pl.when(number > 0)
        def _() -> None:
            here = pl.ds(tile * tile_rows, tile_rows)
            for part in range(shape.parts):
                plgpu.copy_gmem_to_smem(
                    q_ref.at[head, part, here], q_smem.at[part, pl.ds(0, tile_rows)], q_barrier
                )
                plgpu.barrier_wait(q_barrier)
            for stage in range(stages):
                pl.when(stage < number)(lambda stage=stage: fetch(jnp.int32(stage), stage))

        at = (row, pl.ds(tile * ROWS, ROWS))
        newest, oldest = (
            plgpu.load(ref.at[at], layout=by_row, optimized=False)
            for ref in (newest_ref, oldest_ref)
        )

        def step(index: Array, carry: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
            outs, largest, total = carry
            stage = lax.rem(index, jnp.int32(stages))
            plgpu.barrier_wait(barriers.at[stage])
            block = operands(k_smem.at[stage])
            logits = multiply(q_smem, [part.transpose((1, 0)) for part in block], BLOCK)
            slots = plgpu.load(
                at_smem.at[stage], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
            )
            slots = lax.broadcast_in_dim(slots, (ROWS, BLOCK), (1,))
            place = plgpu.broadcasted_iota(
                jnp.int32, (ROWS, BLOCK), 1, layout=plgpu.Layout.WGMMA
            ) + (begins(index) - base)
            seen = (slots <= across(newest, BLOCK)) & (slots > across(oldest, BLOCK))
            least = jnp.maximum((first + index) * BLOCK - shift, 0)
            seen &= (place >= least) & (place < length)
            logits = jnp.where(seen, logits * size**-0.5, -jnp.inf)
            if logits_ref is not None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                logits_smem[...] = logits
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    logits_smem.at[pl.ds(0, tile_rows)],
                    logits_ref.at[head, :, pl.ds((first + index) * BLOCK, BLOCK)],
                )
            logits = logits * _LOG2E
            now = jnp.maximum(largest, jnp.max(logits, axis=1))
            weights = jnp.exp2(logits - across(now, BLOCK))
            shrink = jnp.exp2(largest - now)
            total = total * shrink + jnp.sum(weights, axis=1)
            for part, array in enumerate(shape.split(weights)):
                p_smem[part] = array
            plgpu.commit_smem()
            block, added = operands(v_smem.at[stage]), []
            for some, out in zip(columns, outs, strict=True):
                product = multiply(p_smem, [part.at[:, some] for part in block], width)
                added.append(out * across(shrink, width) + product)
            pl.when(index + stages < number)(lambda: fetch(index + stages, stage))
            return tuple(added), now, total

        nothing = jnp.zeros((ROWS, width), jnp.float32)
        start = (
            tuple(plgpu.layout_cast(nothing, plgpu.Layout.WGMMA) for _ in columns),
            plgpu.layout_cast(jnp.full((ROWS,), -1e30, jnp.float32), by_row),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), by_row),
        )
        outs, largest, total = lax.fori_loop(0, number, step, start)

        used, here = pl.ds(0, tile_rows), pl.ds(tile * tile_rows, tile_rows)
        lse = largest * (1 / _LOG2E) + jnp.log(jnp.maximum(total, 1e-30))
        lse_smem[...] = jnp.where(total > 0, lse, -jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(lse_smem.at[used], lse_ref.at[head, chunk, here])

        @pl.when(number > 0)
        def _() -> None:
            for some, out in zip(columns, outs, strict=True):
                out_smem[:, some] = out / across(jnp.maximum(total, 1e-30), width)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[used], out_ref.at[head, chunk, here])

        plgpu.wait_smem_to_gmem(0)

    out_type = [
        jax.ShapeDtypeStruct((heads, chunks, tiles * tile_rows, size), jnp.float32),
        jax.ShapeDtypeStruct((heads, chunks, tiles * tile_rows), jnp.float32),
    ]
    if shape.with_logits:
        written = (heads, tile_rows, blocks * BLOCK)
        out_type.append(jax.ShapeDtypeStruct(written, jnp.float32))
    call = plgpu.kernel(
        attend,
        out_type=out_type,
        scratch_types=shape.scratch(1 + 2 * copies),
        grid=(chunks, heads, tiles),
        grid_names=("chunk", "head", "tile"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=lowering.gpu_interpret(),
    )
    arrays = (queries, cache.keys, cache.values, cache.positions, newest, oldest, lengths)
    return call(*arrays, *([] if cache.table is None else [cache.table]))
