"""Compaction in place on GPU: the tensor memory accelerator copies each row that stays.

Grid: one block of threads per head. It puts together a block of destination slots at a time in
shared memory, by one copy per row or, of rows that lie together, by one for all, and writes it by
one copy. Kept slots ascend, so the sources of a block and of all later ones lie at or behind the
block's first slot: while one block is written, the next one's sources are on their way, and none
of them is overwritten before it is read. Where nothing stays, copies from behind the array's end
fill with zeros.

A block whose rows all stay where they are is neither read nor written. Bytes: each row that
moves, once in and once out, rounded to 32; 4 per slot of indices; and the slots from `lengths` to
`held` (at most to the end of a block) once out. Rows are padded in shared memory only.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from kernels_pallas import lowering
from kernels_pallas.gather_compact.axes import axes
from kernels_pallas.partition import partitioned

_BLOCK_BYTES = 2**14  # of an array in shared memory, twice
_TOGETHER = 4  # indices that are read at once


@partitioned(axes)
def compact(
    arrays: tuple[Array, ...],
    indices: Int[Array, "*n C"],
    lengths: Int[Array, "*n"],
    held: Int[Array, "*n"],
    table: Int[Array, "*n M"] | None = None,
) -> tuple[Array, ...]:
    """As the reference."""
    decline(arrays)
    heads = math.prod(lengths.shape)
    if table is None:
        page = None
        slots = arrays[0].shape[indices.ndim - 1]
        rows = [array.reshape(heads, slots, array.shape[-1]) for array in arrays]
    else:
        page = arrays[0].shape[2]
        slots = table.shape[-1] * page
        rows = [array.reshape(array.shape[0], -1, array.shape[-1]) for array in arrays]
    widths = [_padded_width(array) for array in rows]
    largest = max(width * array.dtype.itemsize for width, array in zip(widths, rows, strict=True))
    size = min(_BLOCK_BYTES // largest, 64, slots if page is None else page)
    if page is not None:
        size = next(part for part in range(size, 0, -1) if page % part == 0)
    # Behind the indices, up to what is held, slots are cleared.
    blocks = -(-max(indices.shape[-1], slots) // size)
    place = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
    known = jnp.where(place < lengths[..., None], indices, slots).reshape(heads, -1)
    known = jnp.pad(known, ((0, 0), (0, blocks * size - indices.shape[-1])), constant_values=slots)
    operands = [lengths.reshape(-1), held.reshape(-1), known]
    if table is not None:
        operands.append(table.reshape(heads, -1))

    def body(lengths: Any, held: Any, index: Any, *refs: Any) -> None:
        pages, refs = (None, refs) if page is None else (refs[0], refs[1:])
        targets, buffers = refs[: len(rows)], refs[len(rows) : -2]
        single, together = refs[-2:]
        head = lax.axis_index("head")
        lead = head if page is None else head // lengths_of_head % rows[0].shape[0]
        length, end = lengths[head], jnp.maximum(lengths[head], held[head])
        first_column = jnp.minimum(head, 0)  # 0, and no constant: columns may end behind the array

        def row_of(slot: Any, array: Any) -> Any:
            if pages is None or page is None:
                return slot
            inside = pages[head, jnp.minimum(slot, slots - 1) // page] * page + slot % page
            return jnp.where(slot < slots, inside, array.shape[1])

        def plan(block: Any) -> tuple[Any, Any]:
            """Whether a block is left as it is, and whether its sources lie together."""
            first = block * size
            moved = jnp.clip(length - first, 0, size)
            total = jnp.clip(end - first, 0, size)
            start = index[head, first]
            last = index[head, first + jnp.maximum(moved - 1, 0)]
            stays = (moved == total) & (last == first + moved - 1)
            run = (moved == size) & (last - start == size - 1)
            if page is not None:
                run &= start // page == last // page
            return stays, run

        def copies(source: Any, count: int, half: Any, at: Any, barrier: Any) -> None:
            for target, buffer, width in zip(targets, buffers, widths, strict=True):
                plgpu.copy_gmem_to_smem(
                    target.at[
                        lead, pl.ds(row_of(source, target), count), pl.ds(first_column, width)
                    ],
                    buffer.at[half, pl.ds(at, count)],
                    barrier.at[half],
                )

        def fetch(block: Any) -> None:
            half = block % 2
            stays, run = plan(block)

            @pl.when(~stays & run)
            def fetch_together() -> None:
                copies(index[head, block * size], size, half, 0, together)

            @pl.when(~stays & ~run)
            def fetch_each() -> None:
                def some(at: Any, count: int) -> None:
                    # Loaded together, so that their latencies overlap.
                    sources = [index[head, block * size + at + one] for one in range(count)]
                    for one, source in enumerate(sources):
                        copies(source, 1, half, at + one, single)

                lax.fori_loop(
                    0, size // _TOGETHER, lambda at, _: some(at * _TOGETHER, _TOGETHER), None
                )
                if size % _TOGETHER:
                    some(size - size % _TOGETHER, size % _TOGETHER)

        def step(block: Any, _: None) -> None:
            half = block % 2
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @pl.when((block + 1) * size < end)
            def fetch_next() -> None:
                fetch(block + 1)

            stays, run = plan(block)

            @pl.when(~stays & run)
            def wait_together() -> None:
                plgpu.barrier_wait(together.at[half])

            @pl.when(~stays & ~run)
            def wait_each() -> None:
                plgpu.barrier_wait(single.at[half])

            @pl.when(~stays)
            def write() -> None:
                for target, buffer, width in zip(targets, buffers, widths, strict=True):
                    plgpu.copy_smem_to_gmem(
                        buffer.at[half],
                        target.at[
                            lead,
                            pl.ds(row_of(block * size, target), size),
                            pl.ds(first_column, width),
                        ],
                    )

        @pl.when(end > 0)
        def fetch_first() -> None:
            fetch(jnp.int32(0))

        lax.fori_loop(0, pl.cdiv(end, size), step, None)
        plgpu.wait_smem_to_gmem(0)

    lengths_of_head = lengths.shape[-1]
    results = [jax.new_ref(array) for array in rows]
    with jax.named_scope("compact"):
        plgpu.kernel(
            body,
            out_type=(),
            grid=(heads,),
            grid_names=("head",),
            scratch_types=[
                *(
                    plgpu.SMEM((2, size, width), array.dtype)
                    for width, array in zip(widths, rows, strict=True)
                ),
                plgpu.Barrier(num_arrivals=size * len(rows), num_barriers=2),
                plgpu.Barrier(num_arrivals=len(rows), num_barriers=2),
            ],
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
            interpret=lowering.gpu_interpret(),
        )(*operands, *results)
    return tuple(
        jax.freeze(result).reshape(array.shape)
        for result, array in zip(results, arrays, strict=True)
    )


def decline(arrays: tuple[Array, ...], table: Array | None = None) -> None:
    """Declines rows that are no whole copies, with or without pages."""
    del table
    for array in arrays:
        width, itemsize = array.shape[-1], array.dtype.itemsize
        if width * itemsize % 16:
            raise NotImplementedError(
                f"rows of {width} {array.dtype}: allowed are rows of a multiple of 16 bytes"
            )
        if _padded_width(array) > 256:
            raise NotImplementedError(f"rows of {width} elements: allowed are 256")


def _padded_width(array: Array) -> int:
    """Elements of a row in shared memory: a multiple of 128 bytes."""
    itemsize = array.dtype.itemsize
    return int(-(-array.shape[-1] * itemsize // 128) * 128 // itemsize)
