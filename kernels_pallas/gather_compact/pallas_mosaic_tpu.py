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
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from kernels_pallas import lowering

_BLOCK = 128  # destination slots of a grid step


def compact(
    arrays: tuple[Array, ...],
    indices: Int[Array, "*n C"],
    lengths: Int[Array, "*n"],
    held: Int[Array, "*n"],
    table: Int[Array, "*n M"] | None = None,
) -> tuple[Array, ...]:
    """As the reference."""
    done: list[Array | None] = [None] * len(arrays)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        chosen = [at for at, array in enumerate(arrays) if array.dtype == dtype]
        results = _compact_alike([arrays[at] for at in chosen], indices, lengths, held, table)
        for at, result in zip(chosen, results, strict=True):
            done[at] = result
    return tuple(array for array in done if array is not None)


def _compact_alike(
    arrays: Sequence[Array],
    indices: Int[Array, "*n C"],
    lengths: Int[Array, "*n"],
    held: Int[Array, "*n"],
    table: Int[Array, "*n M"] | None,
) -> list[Array]:
    """Arrays of one dtype."""
    dtype = arrays[0].dtype
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"dtype {dtype}: allowed are float32 and bfloat16")
    packed = 4 // dtype.itemsize  # rows that share a word
    granule = 8 * packed
    heads = math.prod(lengths.shape)
    if table is None:
        slots = arrays[0].shape[indices.ndim - 1]
        rows = [array.reshape(heads, slots, array.shape[-1]) for array in arrays]
    else:
        page = arrays[0].shape[2]
        if page % granule:
            raise NotImplementedError(
                f"pages of {page} slots: allowed in {dtype} are multiples of {granule}"
            )
        slots = table.shape[-1] * page
        rows = [array.reshape(array.shape[0], -1, array.shape[-1]) for array in arrays]

    size = min(_BLOCK, -(-slots // granule) * granule)
    blocks = -(-indices.shape[-1] // size)
    wide = jnp.full((heads, 1, blocks * size), slots, jnp.int32)
    wide = wide.at[:, 0, : indices.shape[-1]].set(indices.reshape(heads, -1))
    window = size * 2  # rows of a block's sources; dense ones are at most 1.4 * size

    def flat(block: Callable[[Any, Any], tuple[Any, Any, Any]], ahead: int) -> Callable[..., Any]:
        def index(step: Any, *_: Any) -> tuple[Any, Any, Any]:
            step = jnp.minimum(step + ahead, heads * blocks - 1)
            return block(step // blocks, step % blocks)

        return index

    def scalars(width: int, block: Callable[..., Any]) -> list[pl.BlockSpec]:
        spaces = {"memory_space": pltpu.SMEM}
        return [pl.BlockSpec((1, 1, width), flat(block, ahead), **spaces) for ahead in (0, 1)]

    operands = [wide, wide]
    specs = scalars(size, lambda head, block: (head, 0, block))
    if table is not None:
        pages = table.reshape(heads, 1, -1)
        operands += [pages, pages]
        specs += scalars(pages.shape[-1], lambda head, _: (head, 0, 0))
    # The last of an odd number of bfloat16 rows is in no aligned pair: it goes beside the array.
    lone = table is None and slots % packed != 0
    tails = []
    if lone:
        tails = [jnp.pad(a[:, slots - 1 :], ((0, 0), (0, 1), (0, 0))) for a in rows]
    operands += tails
    specs += [pl.BlockSpec(memory_space=pl.ANY)] * len(tails)
    first = 2 + len(operands)
    kernel = _Kernel(
        blocks=blocks,
        size=size,
        slots=slots,
        packed=packed,
        page=None if table is None else page,
        lone=lone,
        arrays=len(rows),
        lead=lambda head: head if table is None else head // lengths.shape[-1] % len(rows[0]),
    )
    words = []
    if packed > 1:
        for a in rows:
            words += [
                pltpu.VMEM((count // packed, a.shape[-1]), jnp.uint32) for count in (window, size)
            ]
    with jax.named_scope("compact"):
        results = pl.pallas_call(
            kernel.step,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(heads * blocks,),
                in_specs=specs + [pl.BlockSpec(memory_space=pl.ANY)] * len(rows),
                out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(rows),
                scratch_shapes=[
                    *(pltpu.VMEM((2, window, a.shape[-1]), dtype) for a in rows),
                    *(pltpu.VMEM((2, size, a.shape[-1]), dtype) for a in rows),
                    *words,
                    pltpu.SMEM((2, size), jnp.int32),
                    pltpu.SMEM((2, 4), jnp.int32),
                    pltpu.SemaphoreType.DMA((2,)),
                    pltpu.SemaphoreType.DMA((2,)),
                ],
            ),
            out_shape=[jax.ShapeDtypeStruct(a.shape, dtype) for a in rows],
            input_output_aliases={first + at: at for at in range(len(rows))},
            compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
            interpret=lowering.tpu_interpret(),
        )(lengths.reshape(-1), held.reshape(-1), *operands, *rows)
    if lone:
        full = (lengths.reshape(-1) == slots)[:, None]
        clear = (held.reshape(-1) == slots)[:, None]
        results = [
            a.at[:, slots - 1].set(
                jnp.where(full | ~clear, tail[:, 0], jnp.zeros((), dtype)), unique_indices=True
            )
            for a, tail in zip(results, tails, strict=True)
        ]
    return [a.reshape(b.shape) for a, b in zip(results, arrays, strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel:
    """What is static in the kernel, and its body."""

    blocks: int  # of a head
    size: int  # destination slots of a block
    slots: int  # of a head
    packed: int  # rows that share a word: the smallest copy
    page: int | None  # slots of a page, where there are pages
    lone: bool  # the last slot is in `tails`
    arrays: int
    lead: Callable[[Any], Any]  # of a head: the leading index into the arrays

    @property
    def granule(self) -> int:
        """Rows of the smallest tile-aligned copy."""
        return 8 * self.packed

    def step(self, lengths: Any, held: Any, index: Any, next_index: Any, *refs: Any) -> None:
        """Fetches the next block's sources, then puts this one together and writes it."""
        tables, refs = (refs[:2], refs[2:]) if self.page is not None else ((None, None), refs)
        tails, refs = (refs[: self.arrays], refs[self.arrays :]) if self.lone else ((), refs)
        refs = refs[self.arrays :]  # the operands are the results' memory
        rows, windows, outs = (refs[at * self.arrays : (at + 1) * self.arrays] for at in range(3))
        *words, places, counts, reads, writes = refs[3 * self.arrays :]
        step, steps = pl.program_id(0), pl.num_programs(0)

        def fetch(step: Any, index: Any, table: Any) -> None:
            head, block, half = step // self.blocks, step % self.blocks, step % 2
            moved, _ = self._plan(block, lengths[head], held[head], index)
            sources = (head, half, moved, index, table, places, counts)
            counts[half, 0] = 0
            counts[half, 1] = 0
            first = index[0, 0, 0] // self.granule
            last = index[0, 0, jnp.maximum(moved - 1, 0)] // self.granule
            granules = last - first + 1
            dense = granules * self.granule * 5 <= moved * 7
            # A granule that is cut off by the end of the array is no whole copy.
            dense &= (last + 1) * self.granule <= self.slots
            dense &= moved > 0

            @pl.when(dense)
            def _() -> None:
                self._fetch_granules(first, granules, *sources, rows, windows, reads)

            @pl.when(~dense & (moved > 0))
            def _() -> None:
                self._fetch_words(*sources, rows, windows, tails, reads)

        @pl.when(step == 0)
        def _() -> None:
            counts[0, 2] = 0
            counts[1, 2] = 0
            counts[0, 3] = 0
            counts[1, 3] = 0
            fetch(step, index, tables[0])

        @pl.when(step + 1 < steps)
        def _() -> None:
            fetch(step + 1, next_index, tables[1])

        head, block, half = step // self.blocks, step % self.blocks, step % 2
        moved, total = self._plan(block, lengths[head], held[head], index)

        @pl.when(total > 0)
        def _() -> None:
            self._wait_reads(half, counts, windows, reads)
            self._wait_writes(half, counts, outs, writes)
            granules = pl.cdiv(total, self.granule)
            for at, (window, out) in enumerate(zip(windows, outs, strict=True)):
                scratch = words[2 * at : 2 * at + 2] if words else (None, None)
                self._assemble(half, moved, granules, places, counts, window, out, *scratch)
            self._write(head, block, half, granules, tables[0], counts, outs, rows, writes)

        @pl.when(step + 1 == steps)
        def _() -> None:
            self._wait_writes(0, counts, outs, writes)
            self._wait_writes(1, counts, outs, writes)

    def _plan(self, block: Any, length: Any, held: Any, index: Any) -> tuple[Any, Any]:
        """Rows of a block that are moved, and rows that are written; none where all stay."""
        first = block * self.size
        moved = jnp.clip(length - first, 0, self.size)
        total = jnp.clip(jnp.maximum(length, held) - first, 0, self.size)
        stay = index[0, 0, jnp.maximum(moved - 1, 0)] == first + moved - 1
        stay &= moved == total
        return jnp.where(stay, 0, moved), jnp.where(stay, 0, total)

    def _row(self, slot: Any, table: Any, aligned: int) -> Any:
        """The row of the arrays that holds a slot."""
        if self.page is not None:
            slot = table[0, 0, slot // self.page] * self.page + slot % self.page
        return pl.multiple_of(slot, aligned)

    def _fetch_granules(
        self, first: Any, granules: Any, head: Any, half: Any, moved: Any, index: Any, table: Any,
        places: Any, counts: Any, rows: Any, windows: Any, reads: Any,
    ) -> None:  # fmt: skip
        size = self.granule
        counts[half, 0] = granules

        def copy(at: Any, _: None) -> None:
            source = pl.ds(self._row((first + at) * size, table, size), size)
            target = pl.ds(pl.multiple_of(at * size, size), size)
            for array, window in zip(rows, windows, strict=True):
                pltpu.make_async_copy(
                    array.at[self.lead(head), source], window.at[half, target], reads.at[half]
                ).start()

        def place(at: Any, _: None) -> None:
            places[half, at] = index[0, 0, at] - first * size

        lax.fori_loop(0, granules, copy, None)
        lax.fori_loop(0, moved, place, None)

    def _fetch_words(
        self, head: Any, half: Any, moved: Any, index: Any, table: Any, places: Any, counts: Any,
        rows: Any, windows: Any, tails: Any, reads: Any,
    ) -> None:  # fmt: skip
        size = self.packed

        def copy(at: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            before, used = carry
            slot = index[0, 0, at]
            word = slot // size
            new = word != before
            target = pl.ds(pl.multiple_of(used * size, size), size)
            behind = jnp.bool_(False)
            if self.lone:
                behind = word == self.slots // size

                @pl.when(new & behind)
                def _() -> None:
                    for tail, window in zip(tails, windows, strict=True):
                        pltpu.make_async_copy(
                            tail.at[head], window.at[half, target], reads.at[half]
                        ).start()

            @pl.when(new & ~behind)
            def _() -> None:
                source = pl.ds(self._row(word * size, table, size), size)
                for array, window in zip(rows, windows, strict=True):
                    pltpu.make_async_copy(
                        array.at[self.lead(head), source], window.at[half, target], reads.at[half]
                    ).start()

            used = used + new.astype(jnp.int32)
            places[half, at] = (used - 1) * size + slot % size
            return word, used

        counts[half, 1] = lax.fori_loop(0, moved, copy, (jnp.int32(-1), jnp.int32(0)))[1]

    def _assemble(
        self, half: Any, moved: Any, granules: Any, places: Any, counts: Any, window: Any, out: Any,
        words: Any, built: Any,
    ) -> None:  # fmt: skip
        """A block's rows from the window in their order; of two rows to a word, word by word."""
        tile, whole = self.granule, self.packed == 1
        rows = window.at[half] if whole else words
        target = out.at[half] if whole else built
        zero = jnp.zeros((), rows.dtype)

        def unpack(at: Any, _: None) -> None:
            packed = window[half, pl.ds(pl.multiple_of(at * tile, tile), tile), :]
            words[pl.ds(pl.multiple_of(at * 8, 8), 8), :] = pltpu.bitcast(packed, jnp.uint32)

        def row(slot: Any) -> Any:
            place = jnp.where(slot < moved, places[half, slot], 0)
            found = rows[pl.ds(place // self.packed, 1), :]
            if not whole:
                found = (found >> (16 * (place % 2)).astype(jnp.uint32)) & jnp.uint32(0xFFFF)
            return jnp.where(slot < moved, found, zero)

        def put(at: Any, _: None) -> None:
            for word in range(8):
                slot = at * tile + word * self.packed
                joined = row(slot)
                if not whole:
                    joined = joined | (row(slot + 1) << jnp.uint32(16))
                target[pl.ds(at * 8 + word, 1), :] = joined
            if not whole:
                packed = pltpu.bitcast(built[pl.ds(pl.multiple_of(at * 8, 8), 8), :], out.dtype)
                out[half, pl.ds(pl.multiple_of(at * tile, tile), tile), :] = packed

        if not whole:
            fetched = counts[half, 0] + pl.cdiv(counts[half, 1] * self.packed, tile)
            lax.fori_loop(0, fetched, unpack, None)
        lax.fori_loop(0, granules, put, None)

    def _write(
        self, head: Any, block: Any, half: Any, granules: Any, table: Any, counts: Any, outs: Any,
        rows: Any, writes: Any,
    ) -> None:  # fmt: skip
        size = self.granule
        whole = self.slots // size  # granules of a head
        rest = self.slots % size // self.packed * self.packed
        here = jnp.minimum(granules, whole - block * (self.size // size))
        counts[half, 2] = here

        def copy(at: Any, _: None) -> None:
            source = pl.ds(pl.multiple_of(at * size, size), size)
            target = pl.ds(self._row(block * self.size + at * size, table, size), size)
            for array, out in zip(rows, outs, strict=True):
                pltpu.make_async_copy(
                    out.at[half, source], array.at[self.lead(head), target], writes.at[half]
                ).start()

        lax.fori_loop(0, here, copy, None)
        if rest:
            counts[half, 3] = (granules > here).astype(jnp.int32)

            @pl.when(granules > here)
            def _() -> None:
                source = pl.ds(whole * size % self.size, rest)
                for array, out in zip(rows, outs, strict=True):
                    pltpu.make_async_copy(
                        out.at[half, source],
                        array.at[self.lead(head), pl.ds(whole * size, rest)],
                        writes.at[half],
                    ).start()

    def _wait_reads(self, half: Any, counts: Any, windows: Any, reads: Any) -> None:
        for kind, size in ((0, self.granule), (1, self.packed)):

            def wait(_: Any, __: None, size: int = size) -> None:
                for window in windows:
                    copied = window.at[half, pl.ds(0, size)]
                    pltpu.make_async_copy(copied, copied, reads.at[half]).wait()

            lax.fori_loop(0, counts[half, kind], wait, None)

    def _wait_writes(self, half: Any, counts: Any, outs: Any, writes: Any) -> None:
        rest = self.slots % self.granule // self.packed * self.packed
        for kind, size in ((2, self.granule), (3, rest)):

            def wait(_: Any, __: None, size: int = size) -> None:
                for out in outs:
                    copied = out.at[half, pl.ds(0, size)]
                    pltpu.make_async_copy(copied, copied, writes.at[half]).wait()

            if size:
                lax.fori_loop(0, counts[half, kind], wait, None)
            counts[half, kind] = 0
