"""The kernel of decode attention on Hopper: one chunk of one head's slots per block of threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from kernels_pallas import lowering
from kernels_pallas.attention.blocks import pad_to
from kernels_pallas.ragged_decode.mosaic_gpu_cache import BLOCK, Cache
from kernels_pallas.ragged_decode.mosaic_gpu_shared import ROWS, Shared

_THREAD_BLOCKS = 2 * 2 * 132  # two waves of two on each SM of H200
_MOST_BLOCKS = 32  # in a chunk
_LOG2E = math.log2(math.e)


def attend(
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
    """Per chunk the output [B * K, C, R, D] and log-sum-exp; with logits [B * K, R, S'] too."""
    heads, slots, in_pages = queries.shape[0], cache.slots, cache.table is not None
    # A head whose first row is no multiple of 8 starts up to 7 columns into its first block.
    stride = cache.positions.shape[0] // heads if in_pages else slots
    blocks = -(-(slots + (0 if in_pages or slots % 8 == 0 else 7)) // BLOCK)
    size, tile_rows, stages = shape.size, shape.tile_rows, shape.stages
    # A chunk's partial results stay below half of what it reads.
    least = -(-tile_rows // 16)
    per_chunk = max(least, min(_MOST_BLOCKS, -(-blocks * heads * tiles // _THREAD_BLOCKS)))
    chunks = -(-blocks // per_chunk)
    copies = BLOCK // cache.rows_per_copy
    table = 4 * -(-per_chunk * copies // 4) if in_pages else 0
    total_rows = cache.positions.shape[0]
    width = shape.columns
    columns = [pl.ds(first, width) for first in range(0, size, width)]
    by_row = plgpu.Layout.WGMMA.reduce(1)

    def across(x: Array, columns: int) -> Array:
        return lax.broadcast_in_dim(x, (ROWS, columns), (0,))

    def kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, at_ref, newest_ref, oldest_ref, length_ref, *refs_ = refs
        table_ref = refs_.pop(0) if cache.table is not None else None
        out_ref, lse_ref = refs_[:2]
        logits_ref = refs_[2] if shape.with_logits else None
        scratch = refs_[2 + shape.with_logits :]
        q_smem, shared, at_smem, p_smem, lse_smem, q_barrier, table_barrier, barriers, optional = (
            scratch
        )
        (k_smem, v_smem), out_smem = shared
        part_smem, logits_smem, table_smem = optional
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

        def sources(index: Array) -> list[Array]:
            """The rows at which the copies of block `index` begin."""
            if table_smem is None:
                return [begins(index)]
            rows = (table_smem[index * copies + copy] for copy in range(copies))
            return [pl.multiple_of(row, 8) for row in rows]

        def fetch(index: Array, stage: Any) -> None:
            barrier = barriers.at[stage]
            at = pl.ds(begins(index), BLOCK)
            plgpu.copy_gmem_to_smem(at_ref.at[at], at_smem.at[stage], barrier)
            for copy, row in enumerate(sources(index)):
                source = pl.ds(row, cache.rows_per_copy)
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
            if table_ref is not None:
                plgpu.copy_gmem_to_smem(table_ref.at[head, chunk], table_smem, table_barrier)
                plgpu.barrier_wait(table_barrier)
            for stage in range(stages):

                @pl.when(stage < number)
                def _(stage: int = stage) -> None:
                    fetch(jnp.int32(stage), stage)

            here = pl.ds(tile * tile_rows, tile_rows)
            for part in range(shape.parts):
                plgpu.copy_gmem_to_smem(
                    q_ref.at[head, part, here], q_smem.at[part, pl.ds(0, tile_rows)], q_barrier
                )
            plgpu.barrier_wait(q_barrier)

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
            place = plgpu.broadcasted_iota(
                jnp.int32, (BLOCK,), 0, layout=plgpu.Layout.WGMMA.reduce(0)
            ) + (begins(index) - base)
            least = jnp.maximum((first + index) * BLOCK - shift, 0)
            slots = jnp.where((place >= least) & (place < length), slots, -1)
            slots = lax.broadcast_in_dim(slots, (ROWS, BLOCK), (1,))
            seen = (slots <= across(newest, BLOCK)) & (slots > across(oldest, BLOCK))
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
        kernel,
        out_type=out_type,
        scratch_types=shape.scratch(1 + 2 * copies, table),
        grid=(chunks, heads, tiles),
        grid_names=("chunk", "head", "tile"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=lowering.gpu_interpret(),
    )
    arrays = [queries, cache.keys, cache.values, cache.positions, newest, oldest, lengths]
    if cache.table is not None:
        starts = pad_to(cache.table, per_chunk * copies, 1).reshape(heads, chunks, -1)
        arrays.append(pad_to(starts, 4, 2))  # TMA wants 16 bytes
    return call(*arrays)
