"""Decode attention over a paged cache, copied page by page into two buffers (TPU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from kernels_pallas import lowering
from kernels_pallas.attention.blocks import pad_to
from kernels_pallas.ragged_decode import mosaic_tpu_layout as layout
from kernels_pallas.ragged_decode import mosaic_tpu_softmax as softmax
from kernels_pallas.ragged_decode import reference
from kernels_pallas.ragged_decode.mosaic_tpu_layout import LANES

_MOST_TABLE_BYTES = 2**18  # of a page table in SMEM
_MOST_LOGITS_BYTES = 2**21  # of one head in VMEM


def attend(
    queries: Array,
    cache: tuple[Array, Array, Array, Array, Array],
    query_positions: Array,
    window: int | Array,
    *,
    with_logits: bool,
) -> tuple[Any, ...]:
    keys, values, positions, page_table, lengths = cache
    batch, _, page, size = keys.shape
    kv_heads, pages = page_table.shape[1:]
    layout.check(queries, keys)
    packed = 8 * (4 // keys.dtype.itemsize)
    if page % packed or (page % LANES and LANES % page):
        raise NotImplementedError(
            f"pages of {page} slots in {keys.dtype}: allowed are multiples of {packed} that divide "
            f"{LANES}, and its multiples"
        )
    if page_table.size * 4 > _MOST_TABLE_BYTES:
        raise NotImplementedError(
            f"a page table of {page_table.size} entries: allowed are {_MOST_TABLE_BYTES // 4}"
        )
    per_block = max(
        1,
        min(layout.block(size, keys.dtype), -(-pages * page // LANES) * LANES) // page,
    )
    block = per_block * page
    # Positions are gathered beforehand: 4 bytes per slot of capacity, in lanes.
    slots = pad_to(reference.slot_positions(positions, page_table, lengths), block, 2, fill=-1)
    width = slots.shape[2]
    grouped, ranges, tile, most = layout.tiled(
        queries, query_positions, kv_heads, window, with_logits
    )
    tiles = grouped.shape[2] // tile
    if with_logits and tile * width * 4 > _MOST_LOGITS_BYTES:
        raise NotImplementedError(
            f"logits of {tile} rows over {width} slots: allowed are {_MOST_LOGITS_BYTES // 4}"
        )
    steps = batch * kv_heads * tiles

    def kernel(lengths_ref: Any, table_ref: Any, *refs: Any) -> None:
        q_ref, range_ref, at_ref, k_hbm, v_hbm, out_ref, lse_ref, *others = refs
        logits_ref = others.pop(0) if with_logits else None
        *state, k_buffer, v_buffer, turn_ref, semaphores = others
        step = (pl.program_id(0) * kv_heads + pl.program_id(1)) * tiles + pl.program_id(2)

        def length_of(step: Any) -> Any:
            return lengths_ref[step // (kv_heads * tiles), step // tiles % kv_heads]

        def each_page(step: Any, index: Any, buffer: Any, act: Callable[[Any], None]) -> None:
            """Starts or awaits the copies of block `index` of the head that `step` works on."""
            row, head = step // (kv_heads * tiles), step // tiles % kv_heads
            used = jnp.minimum(pl.cdiv(length_of(step), page) - index * per_block, per_block)

            @pl.loop(0, used)
            def _(at: Any) -> None:
                number = jnp.maximum(table_ref[row * kv_heads + head, index * per_block + at], 0)
                into = pl.ds(pl.multiple_of(at * page, page), page)
                for which, (hbm, vmem) in enumerate(((k_hbm, k_buffer), (v_hbm, v_buffer))):
                    act(
                        pltpu.make_async_copy(
                            hbm.at[row, number], vmem.at[buffer, into], semaphores.at[which, buffer]
                        )
                    )

        def start(step: Any, index: Any, buffer: Any) -> None:
            each_page(step, index, buffer, lambda copy: copy.start())

        length = length_of(step)
        blocks = pl.cdiv(length, block)

        @pl.when(step == 0)
        def _() -> None:
            # Weight 0 of a slot that no copy wrote must not meet a NaN.
            v_buffer[...] = jnp.zeros_like(v_buffer)
            turn_ref[0] = 0
            start(step, 0, 0)

        softmax.begin(state)
        first = turn_ref[0]
        following = jnp.minimum(step + 1, steps - 1)

        @pl.loop(0, blocks)
        def _(index: Any) -> None:
            buffer = (first + index) % 2
            final = index == blocks - 1

            @pl.when(jnp.logical_not(final))
            def _() -> None:
                start(step, index + 1, 1 - buffer)

            @pl.when(final & (step + 1 < steps))
            def _() -> None:
                start(following, 0, 1 - buffer)

            each_page(step, index, buffer, lambda copy: copy.wait())
            here = pl.ds(pl.multiple_of(index * block, LANES), block)
            filled = length - index * block
            logits = softmax.logits(
                q_ref[0, 0], k_buffer[buffer], at_ref[0, 0, :, here], range_ref[0], filled
            )
            if logits_ref is not None:
                logits_ref[0, 0, :, here] = logits
            softmax.add(state, logits, v_buffer[buffer])

        @pl.when((blocks == 0) & (step + 1 < steps))
        def _() -> None:
            start(following, 0, first)

        turn_ref[0] = (first + blocks) % 2
        softmax.finish(state, out_ref, lse_ref)

    def rows_at(row: Any, head: Any, at: Any, *_: Any) -> tuple[Any, ...]:
        return row, head, at, 0

    def head_at(row: Any, head: Any, at: Any, *_: Any) -> tuple[Any, ...]:
        return row, head, 0, 0

    out_specs = [pl.BlockSpec((1, 1, tile, size), rows_at), pl.BlockSpec((1, 1, tile, 1), rows_at)]
    out_shape = layout.results(grouped)
    if with_logits:
        out_specs.append(pl.BlockSpec((1, 1, tile, width), rows_at))
        out_shape.append(jax.ShapeDtypeStruct((*grouped.shape[:3], width), jnp.float32))
    results = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads, tiles),
            in_specs=[
                pl.BlockSpec((1, 1, tile, size), rows_at),
                pl.BlockSpec((1, tile, 2), lambda row, head, at, *_: (row, at, 0)),
                pl.BlockSpec((1, 1, 1, width), head_at),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=out_specs,
            scratch_shapes=[
                *softmax.scratch(tile, size),
                pltpu.VMEM((2, block, size), keys.dtype),
                pltpu.VMEM((2, block, size), keys.dtype),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=out_shape,
        # In order: a head's last block fetches the next head's first.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3),
        interpret=lowering.tpu_interpret(),
    )(lengths, page_table.reshape(-1, pages), grouped, ranges, slots[:, :, None], keys, values)
    return layout.unpacked(results, queries, lengths, pages * page, most)
