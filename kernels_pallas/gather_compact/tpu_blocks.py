"""A block of destination slots on TPU: its sources fetched, put in order, and written.

Every function issues or waits for copies of one block. Two blocks are alive at a time, in the
two halves of each scratch array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# What is counted of each half: copies under way, by their sizes.
GRANULES_READ, WORDS_READ, GRANULES_WRITTEN, REST_WRITTEN = range(4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What is static."""

    blocks: int  # of a head
    size: int  # destination slots of a block
    slots: int  # of a head
    packed: int  # rows that share a word: the smallest copy
    page: int | None  # slots of a page, where there are pages
    lead: Callable[[Any], Any]  # of a head: the leading index into the arrays

    @property
    def granule(self) -> int:
        """Rows of the smallest copy of whole tiles."""
        return 8 * self.packed

    @property
    def rest(self) -> int:
        """Rows of whole words behind the last granule."""
        return self.slots % self.granule // self.packed * self.packed

    @property
    def lone(self) -> bool:
        """Whether the last slot is in no whole word; then it is in `Refs.tails`."""
        return self.slots % self.packed != 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refs:
    """The arrays, in HBM, and what a kernel has beside them; lists have one per array."""

    rows: list[Any]  # [heads or batch, rows, D]
    tails: list[Any]  # [heads, packed, D] in HBM
    windows: list[Any]  # [2, W, D]: sources
    outs: list[Any]  # [2, size, D]: destinations
    words: list[Any]  # of packed arrays: [W / packed, D] sources as uint32
    built: list[Any]  # and [size / packed, D] destinations
    places: Any  # [2, size]: row of the window for each destination
    counts: Any  # [2, 4]
    reads: Any  # semaphores [2]
    writes: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A block of a head: `moved` rows come to it, `total` are written, none where all stay."""

    head: Any
    number: Any
    half: Any
    moved: Any
    total: Any
    index: Any  # [1, 1, size]: source slots
    table: Any  # [1, 1, M]: pages of the head, or None


def block_of(layout: Layout, step: Any, lengths: Any, held: Any, index: Any, table: Any) -> Block:
    head, number = step // layout.blocks, step % layout.blocks
    first = number * layout.size
    moved = jnp.clip(lengths[head] - first, 0, layout.size)
    total = jnp.clip(jnp.maximum(lengths[head], held[head]) - first, 0, layout.size)
    stay = index[0, 0, jnp.maximum(moved - 1, 0)] == first + moved - 1
    stay &= moved == total
    return Block(
        head=head,
        number=number,
        half=step % 2,
        moved=jnp.where(stay, 0, moved),
        total=jnp.where(stay, 0, total),
        index=index,
        table=table,
    )


def fetch(layout: Layout, refs: Refs, block: Block) -> None:
    """Starts the copies of a block's sources."""
    refs.counts[block.half, GRANULES_READ] = 0
    refs.counts[block.half, WORDS_READ] = 0
    first = block.index[0, 0, 0] // layout.granule
    last = block.index[0, 0, jnp.maximum(block.moved - 1, 0)] // layout.granule
    dense = (last - first + 1) * layout.granule * 5 <= block.moved * 7
    # A granule that is cut off by the end of the array is no whole copy.
    dense &= (last + 1) * layout.granule <= layout.slots

    @pl.when((block.moved > 0) & dense)
    def by_granules() -> None:
        _fetch_granules(layout, refs, block, first, last - first + 1)

    @pl.when((block.moved > 0) & ~dense)
    def by_words() -> None:
        _fetch_words(layout, refs, block)


def _row(layout: Layout, slot: Any, table: Any, aligned: int) -> Any:
    """The row of the arrays that holds a slot."""
    if layout.page is not None:
        slot = table[0, 0, slot // layout.page] * layout.page + slot % layout.page
    return pl.multiple_of(slot, aligned)


def _copy_sources(layout: Layout, refs: Refs, block: Block, slot: Any, at: Any, size: int) -> None:
    source = pl.ds(_row(layout, slot, block.table, size), size)
    target = pl.ds(pl.multiple_of(at, size), size)
    for array, window in zip(refs.rows, refs.windows, strict=True):
        pltpu.make_async_copy(
            array.at[layout.lead(block.head), source],
            window.at[block.half, target],
            refs.reads.at[block.half],
        ).start()


def _fetch_granules(layout: Layout, refs: Refs, block: Block, first: Any, count: Any) -> None:
    size = layout.granule
    refs.counts[block.half, GRANULES_READ] = count

    def copy(at: Any, _: None) -> None:
        _copy_sources(layout, refs, block, (first + at) * size, at * size, size)

    def place(at: Any, _: None) -> None:
        refs.places[block.half, at] = block.index[0, 0, at] - first * size

    lax.fori_loop(0, count, copy, None)
    lax.fori_loop(0, block.moved, place, None)


def _fetch_words(layout: Layout, refs: Refs, block: Block) -> None:
    size = layout.packed

    def copy(at: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        before, used = carry
        slot = block.index[0, 0, at]
        word = slot // size
        new = word != before  # neighbours of a word are copied once
        inside = new

        if layout.lone:
            inside = new & (word != layout.slots // size)

            @pl.when(new & (word == layout.slots // size))
            def from_the_tail() -> None:
                target = pl.ds(pl.multiple_of(used * size, size), size)
                for tail, window in zip(refs.tails, refs.windows, strict=True):
                    pltpu.make_async_copy(
                        tail.at[block.head],
                        window.at[block.half, target],
                        refs.reads.at[block.half],
                    ).start()

        @pl.when(inside)
        def from_the_array() -> None:
            _copy_sources(layout, refs, block, word * size, used * size, size)

        used = used + new.astype(jnp.int32)
        refs.places[block.half, at] = (used - 1) * size + slot % size
        return word, used

    used = lax.fori_loop(0, block.moved, copy, (jnp.int32(-1), jnp.int32(0)))[1]
    refs.counts[block.half, WORDS_READ] = used


def assemble(layout: Layout, refs: Refs, block: Block) -> None:
    """Puts a block's rows in order, zeros behind those that stay."""
    tile, half = layout.granule, block.half

    def whole(window: Any, out: Any) -> None:
        def put(at: Any, _: None) -> None:
            for slot in (at * 8 + row for row in range(8)):
                place = jnp.where(slot < block.moved, refs.places[half, slot], 0)
                found = window[half, pl.ds(place, 1), :]
                found = jnp.where(slot < block.moved, found, jnp.zeros((), found.dtype))
                out[half, pl.ds(slot, 1), :] = found

        lax.fori_loop(0, pl.cdiv(block.total, tile), put, None)

    def of_words(window: Any, out: Any, words: Any, built: Any) -> None:
        def unpack(at: Any, _: None) -> None:
            packed = window[half, pl.ds(pl.multiple_of(at * tile, tile), tile), :]
            words[pl.ds(pl.multiple_of(at * 8, 8), 8), :] = pltpu.bitcast(packed, jnp.uint32)

        def row(slot: Any) -> Any:
            place = jnp.where(slot < block.moved, refs.places[half, slot], 0)
            word = words[pl.ds(place // 2, 1), :] >> (16 * (place % 2)).astype(jnp.uint32)
            return jnp.where(slot < block.moved, word & jnp.uint32(0xFFFF), jnp.uint32(0))

        def put(at: Any, _: None) -> None:
            for word in (at * 8 + row for row in range(8)):
                built[pl.ds(word, 1), :] = row(2 * word) | (row(2 * word + 1) << jnp.uint32(16))
            packed = pltpu.bitcast(built[pl.ds(pl.multiple_of(at * 8, 8), 8), :], out.dtype)
            out[half, pl.ds(pl.multiple_of(at * tile, tile), tile), :] = packed

        words_read = refs.counts[half, WORDS_READ] * layout.packed
        fetched = refs.counts[half, GRANULES_READ] + pl.cdiv(words_read, tile)
        lax.fori_loop(0, fetched, unpack, None)
        lax.fori_loop(0, pl.cdiv(block.total, tile), put, None)

    for at, (window, out) in enumerate(zip(refs.windows, refs.outs, strict=True)):
        if layout.packed == 1:
            whole(window, out)
        else:
            of_words(window, out, refs.words[at], refs.built[at])


def write(layout: Layout, refs: Refs, block: Block) -> None:
    """Starts the copies of a block to where it belongs."""
    size, rest = layout.granule, layout.rest
    granules = pl.cdiv(block.total, size)
    whole = layout.slots // size  # granules of a head
    here = jnp.minimum(granules, whole - block.number * (layout.size // size))
    lead = layout.lead(block.head)

    def copy(at: Any, _: None) -> None:
        source = pl.ds(pl.multiple_of(at * size, size), size)
        slot = block.number * layout.size + at * size
        target = pl.ds(_row(layout, slot, block.table, size), size)
        for array, out in zip(refs.rows, refs.outs, strict=True):
            pltpu.make_async_copy(
                out.at[block.half, source], array.at[lead, target], refs.writes.at[block.half]
            ).start()

    lax.fori_loop(0, here, copy, None)
    refs.counts[block.half, GRANULES_WRITTEN] = here
    if not rest:
        return
    refs.counts[block.half, REST_WRITTEN] = (granules > here).astype(jnp.int32)

    @pl.when(granules > here)
    def copy_rest() -> None:
        source = pl.ds(whole * size % layout.size, rest)
        for array, out in zip(refs.rows, refs.outs, strict=True):
            pltpu.make_async_copy(
                out.at[block.half, source],
                array.at[lead, pl.ds(whole * size, rest)],
                refs.writes.at[block.half],
            ).start()


def wait_reads(layout: Layout, refs: Refs, half: Any) -> None:
    """Waits for a block's sources."""
    for kind, size in ((GRANULES_READ, layout.granule), (WORDS_READ, layout.packed)):
        _wait(refs.windows, half, refs.counts[half, kind], size, refs.reads)


def wait_writes(layout: Layout, refs: Refs, half: Any) -> None:
    """Waits until what was written from a half has left it."""
    for kind, size in ((GRANULES_WRITTEN, layout.granule), (REST_WRITTEN, layout.rest)):
        _wait(refs.outs, half, refs.counts[half, kind], size, refs.writes)
        refs.counts[half, kind] = 0


def _wait(buffers: list[Any], half: Any, count: Any, size: int, semaphores: Any) -> None:
    def wait(_: Any, __: None) -> None:
        for buffer in buffers:
            copied = buffer.at[half, pl.ds(0, size)]
            pltpu.make_async_copy(copied, copied, semaphores.at[half]).wait()

    if size:
        lax.fori_loop(0, count, wait, None)
