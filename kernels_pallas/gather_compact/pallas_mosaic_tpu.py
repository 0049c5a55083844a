"""Compaction in place on TPU: copies of whole tiles where many rows stay, of single words else.

Grid: one step per (head, block of 128 destination slots). Kept slots ascend, so the sources of a
block and of all later ones lie at or behind the block's first slot: while one block is put
together in VMEM and written, the next one's sources are on their way, and none of them is
overwritten before it is read.

A block reads its sources in one of two ways, chosen by what is kept:

* dense: the aligned granules (16 rows of bfloat16, 8 of float32) from the first source to the
  last, where these are at most 1.4 times the rows that stay;
* sparse: the single rows of float32. Two bfloat16 rows share every 32-bit word of a TPU array,
  so there the smallest copy is an aligned pair; a pair of which both rows stay is read once.

A block whose rows all stay where they are is neither read nor written.

Bytes, per row that stays: one row written, and read at most 1.4 rows (dense), 1 row (float32) or
2 rows (bfloat16, sparse, no two rows of a pair kept); so (1.4 + 1) / 2 = 1.2 times the bytes of
the kept rows in and out, 1.0 in sparse float32, and in sparse bfloat16 1.5 for lone rows and 1.1
for runs of five. Clearing writes the slots from `lengths` to `held`. Beside these 4 bytes per
slot of indices.

That is so for arrays of 128 elements to a row and of a multiple of 8 slots. Others a TPU program
keeps in another layout than the kernel reads, and copies them to it and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from kernels_pallas import lowering
from kernels_pallas.gather_compact.axes import axes
from kernels_pallas.gather_compact.tpu_blocks import (
    GRANULES_WRITTEN,
    REST_WRITTEN,
    Layout,
    Refs,
    assemble,
    block_of,
    fetch,
    wait_reads,
    wait_writes,
    write,
)
from kernels_pallas.partition import partitioned

_BLOCK = 128  # destination slots of a grid step


@partitioned(axes)
def compact(
    arrays: tuple[Array, ...],
    indices: Int[Array, "*n C"],
    lengths: Int[Array, "*n"],
    held: Int[Array, "*n"],
    table: Int[Array, "*n M"] | None = None,
) -> tuple[Array, ...]:
    """As the reference."""
    decline(arrays, table)
    done: list[Array | None] = [None] * len(arrays)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        chosen = [at for at, array in enumerate(arrays) if array.dtype == dtype]
        results = _compact_alike([arrays[at] for at in chosen], indices, lengths, held, table)
        for at, result in zip(chosen, results, strict=True):
            done[at] = result
    return tuple(array for array in done if array is not None)


def decline(arrays: tuple[Array, ...], table: Array | None = None) -> None:
    """Declines types that are not copied as words, and pages that are not whole granules."""
    for array in arrays:
        dtype = array.dtype
        if dtype not in (jnp.float32, jnp.bfloat16):
            raise NotImplementedError(f"dtype {dtype}: allowed are float32 and bfloat16")
        granule = 8 * _packed(dtype)
        if table is not None and array.shape[2] % granule:
            raise NotImplementedError(
                f"pages of {array.shape[2]} slots: allowed in {dtype} are multiples of {granule}"
            )


def _packed(dtype: Any) -> int:
    """Rows that share a word."""
    return int(4 // dtype.itemsize)


def _compact_alike(
    arrays: Sequence[Array],
    indices: Int[Array, "*n C"],
    lengths: Int[Array, "*n"],
    held: Int[Array, "*n"],
    table: Int[Array, "*n M"] | None,
) -> list[Array]:
    """Arrays of one dtype."""
    dtype = arrays[0].dtype
    packed = _packed(dtype)
    granule = 8 * packed
    heads = math.prod(lengths.shape)
    if table is None:
        slots = arrays[0].shape[indices.ndim - 1]
        rows = [array.reshape(heads, slots, array.shape[-1]) for array in arrays]
    else:
        page = arrays[0].shape[2]
        slots = table.shape[-1] * page
        rows = [array.reshape(array.shape[0], -1, array.shape[-1]) for array in arrays]

    size = min(_BLOCK, -(-slots // granule) * granule)
    layout = Layout(
        # Behind the indices, up to what is held, slots are cleared.
        blocks=-(-max(indices.shape[-1], slots) // size),
        size=size,
        slots=slots,
        packed=packed,
        page=None if table is None else page,
        lead=lambda head: head if table is None else head // lengths.shape[-1] % len(rows[0]),
    )
    wide = jnp.full((heads, 1, layout.blocks * size), slots, jnp.int32)
    wide = wide.at[:, 0, : indices.shape[-1]].set(indices.reshape(heads, -1))
    operands = [wide, wide]
    specs = _scalars(layout, heads, size, lambda head, block: (head, 0, block))
    if table is not None:
        pages = table.reshape(heads, 1, -1)
        operands += [pages, pages]
        specs += _scalars(layout, heads, pages.shape[-1], lambda head, _: (head, 0, 0))
    tails = []
    if layout.lone:
        # The last of an odd number of bfloat16 rows is in no whole word: it goes beside the array.
        tails = [jnp.pad(a[:, slots - 1 :], ((0, 0), (0, 1), (0, 0))) for a in rows]
    first = 2 + len(operands) + len(tails)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    with jax.named_scope("compact"):
        results = pl.pallas_call(
            _kernel(layout, len(rows)),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(heads * layout.blocks,),
                in_specs=[*specs, *(anywhere for _ in (*tails, *rows))],
                out_specs=[anywhere for _ in rows],
                scratch_shapes=_scratch(layout, rows),
            ),
            out_shape=[jax.ShapeDtypeStruct(a.shape, dtype) for a in rows],
            input_output_aliases={first + at: at for at in range(len(rows))},
            compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
            interpret=lowering.tpu_interpret(),
        )(lengths.reshape(-1), held.reshape(-1), *operands, *tails, *rows)
    if layout.lone:
        stays = (lengths.reshape(-1) == slots) | (held.reshape(-1) < slots)
        results = [
            a.at[:, slots - 1].set(jnp.where(stays[:, None], tail[:, 0], jnp.zeros((), dtype)))
            for a, tail in zip(results, tails, strict=True)
        ]
    return [a.reshape(b.shape) for a, b in zip(results, arrays, strict=True)]


def _scalars(
    layout: Layout, heads: int, width: int, block: Callable[[Any, Any], tuple[Any, ...]]
) -> list[pl.BlockSpec]:
    """What a step reads in scalar memory, and then the same of the next step."""

    def index(step: Any, *_: Any) -> tuple[Any, ...]:
        return block(step // layout.blocks, step % layout.blocks)

    def next_index(step: Any, *_: Any) -> tuple[Any, ...]:
        return index(jnp.minimum(step + 1, heads * layout.blocks - 1))

    return [
        pl.BlockSpec((1, 1, width), where, memory_space=pltpu.SMEM) for where in (index, next_index)
    ]


def _scratch(layout: Layout, rows: Sequence[Array]) -> list[Any]:
    """In the order of `Refs`. Dense sources are at most 1.4, packed ones 2 rows for each one."""
    shapes: list[Any] = []
    window = 2 * layout.size
    shapes += [pltpu.VMEM((2, window, a.shape[-1]), a.dtype) for a in rows]
    shapes += [pltpu.VMEM((2, layout.size, a.shape[-1]), a.dtype) for a in rows]
    if layout.packed > 1:
        for count in (window, layout.size):
            words = count // layout.packed
            shapes += [pltpu.VMEM((words, a.shape[-1]), jnp.uint32) for a in rows]
    shapes += [pltpu.SMEM((2, layout.size), jnp.int32), pltpu.SMEM((2, 4), jnp.int32)]
    return [*shapes, pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA((2,))]


def _kernel(layout: Layout, count: int) -> Callable[..., None]:
    def compact(lengths: Any, held: Any, index: Any, next_index: Any, *refs: Any) -> None:
        rest = list(refs)

        def take(number: int) -> list[Any]:
            taken = rest[:number]
            del rest[:number]
            return taken

        table, next_table = take(2) if layout.page is not None else (None, None)
        tails = take(count if layout.lone else 0)
        take(count)  # the operands: the results' memory
        packed = count if layout.packed > 1 else 0
        own = Refs(
            tails=tails,
            rows=take(count),
            windows=take(count),
            outs=take(count),
            words=take(packed),
            built=take(packed),
            places=rest[0],
            counts=rest[1],
            reads=rest[2],
            writes=rest[3],
        )
        step, steps = pl.program_id(0), pl.num_programs(0)
        block = block_of(layout, step, lengths, held, index, table)

        @pl.when(step == 0)
        def start() -> None:
            for half in range(2):
                own.counts[half, GRANULES_WRITTEN] = 0
                own.counts[half, REST_WRITTEN] = 0
            fetch(layout, own, block)

        @pl.when(step + 1 < steps)
        def prefetch() -> None:
            fetch(layout, own, block_of(layout, step + 1, lengths, held, next_index, next_table))

        @pl.when(block.total > 0)
        def move() -> None:
            wait_reads(layout, own, block.half)
            wait_writes(layout, own, block.half)
            assemble(layout, own, block)
            write(layout, own, block)

        @pl.when(step + 1 == steps)
        def finish() -> None:
            wait_writes(layout, own, 0)
            wait_writes(layout, own, 1)

    return compact
