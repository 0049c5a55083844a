"""Decode attention on TPU: one pass over the blocks of slots that each head has filled.

Padded caches come through Pallas's own pipeline: the grid covers the capacity, the index map of K
and V stops at the head's last block (its length is prefetched as a scalar), and a block index that
repeats is not copied again. Paged caches are copied page by page into two buffers of `block` slots,
while one is computed the other is filled, over the heads' borders. Blocks behind the length cost
neither bytes nor FLOPs.

Per slot and KV head that is 2 D elements of K and V and one position read (516 bytes at D 128,
bfloat16; lanes pad D to 128), 4 D R FLOPs for R = G * Q rows. Logits, where asked for, write 4 R
bytes per slot. Products of float32 operands are taken in float32 (three bfloat16 passes or more).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas import lowering
from kernels_pallas.attention.blocks import pad_to
from kernels_pallas.attention.mask import NO_WINDOW
from kernels_pallas.ragged_decode import partials, reference, rows

_TILE = 256  # rows of queries
_LANES = 128
_BUFFER_BYTES = 2**19  # of a block of keys; four of these lie in VMEM
_MOST_TABLE_BYTES = 2**18  # of a page table in SMEM
_MOST_LOGITS_BYTES = 2**21  # of one head in VMEM


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
    cache = (keys, values, key_positions, lengths)
    return _padded(queries, cache, query_positions, window, with_logits=False)[:2]


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
    cache = (keys, values, key_positions, lengths)
    out, lse, logits = _padded(queries, cache, query_positions, window, with_logits=True)
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
    cache = (keys, values, positions, page_table, lengths)
    return _paged(queries, cache, query_positions, window, with_logits=False)[:2]


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
    cache = (keys, values, positions, page_table, lengths)
    out, lse, logits = _paged(queries, cache, query_positions, window, with_logits=True)
    return out, lse, partials.mass(logits, partials.total(lse, others))


def _padded(
    queries: Array,
    cache: tuple[Array, Array, Array, Array],
    query_positions: Array,
    window: int | Array,
    *,
    with_logits: bool,
) -> tuple[Any, ...]:
    keys, values, positions, lengths = cache
    (batch, heads), (kv_heads, slots, size) = queries.shape[:2], keys.shape[1:]
    _check(queries, keys)
    block = min(_block(size, keys.dtype), -(-slots // _LANES) * _LANES)
    blocks = pl.cdiv(slots, block)
    grouped, ranges, tile, most = _tiled(queries, query_positions, kv_heads, window, with_logits)

    def last(row: Array, head: Array, lengths_ref: Any) -> Array:
        return jnp.maximum(pl.cdiv(lengths_ref[row, head], block) - 1, 0)

    def slots_at(row: Any, head: Any, at: Any, index: Any, lengths_ref: Any) -> tuple[Any, ...]:
        return row, head, jnp.minimum(index, last(row, head, lengths_ref)), 0

    def positions_at(row: Any, head: Any, at: Any, index: Any, lengths_ref: Any) -> tuple[Any, ...]:
        return row, head, 0, jnp.minimum(index, last(row, head, lengths_ref))

    def attend(lengths_ref: Any, *refs: Any) -> None:
        q_ref, range_ref, k_ref, v_ref, at_ref, out_ref, lse_ref, *others = refs
        logits_ref = others.pop(0) if with_logits else None
        row, head, _, index = (pl.program_id(axis) for axis in range(4))
        length = lengths_ref[row, head]
        state = tuple(others)

        @pl.when(index == 0)
        def _() -> None:
            _begin(state)

        @pl.when(index * block < length)
        def _() -> None:
            filled = length - index * block
            value = v_ref[0, 0]
            if slots % block:
                # Behind the array's end lies anything, and 0 times anything may be NaN.
                row_of = lax.broadcasted_iota(jnp.int32, value.shape, 0)
                value = jnp.where(row_of < filled, value, jnp.zeros_like(value))
            logits = _logits(q_ref[0, 0], k_ref[0, 0], at_ref[0, 0], range_ref[0], filled)
            if logits_ref is not None:
                logits_ref[0, 0] = logits
            _add(state, logits, value)

        @pl.when(index == blocks - 1)
        def _() -> None:
            _finish(state, out_ref, lse_ref)

    def rows_at(row: Any, head: Any, at: Any, *_: Any) -> tuple[Any, ...]:
        return row, head, at, 0

    out_specs = [pl.BlockSpec((1, 1, tile, size), rows_at), pl.BlockSpec((1, 1, tile, 1), rows_at)]
    out_shape = _results(grouped)
    if with_logits:
        spec = pl.BlockSpec((1, 1, tile, block), lambda row, head, at, index, _: (row, head, at, index))
        out_specs.append(spec)
        shape = (*grouped.shape[:3], blocks * block)
        out_shape.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    results = pl.pallas_call(
        attend,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, grouped.shape[2] // tile, blocks),
            in_specs=[
                pl.BlockSpec((1, 1, tile, size), rows_at),
                pl.BlockSpec((1, tile, 2), lambda row, head, at, *_: (row, at, 0)),
                pl.BlockSpec((1, 1, block, size), slots_at),
                pl.BlockSpec((1, 1, block, size), slots_at),
                pl.BlockSpec((1, 1, 1, block), positions_at),
            ],
            out_specs=out_specs,
            scratch_shapes=_state(tile, size),
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        interpret=lowering.tpu_interpret(),
    )(lengths, grouped, ranges, keys, values, positions[:, :, None])
    return _unpacked(results, queries, lengths, slots, most)


def _paged(
    queries: Array,
    cache: tuple[Array, Array, Array, Array, Array],
    query_positions: Array,
    window: int | Array,
    *,
    with_logits: bool,
) -> tuple[Any, ...]:
    keys, values, positions, page_table, lengths = cache
    (batch, heads), (pool, page, size) = queries.shape[:2], keys.shape[1:]
    kv_heads, pages = page_table.shape[1:]
    _check(queries, keys)
    packed = 8 * (4 // keys.dtype.itemsize)
    if page % packed or page > _LANES and page % _LANES or _LANES % min(page, _LANES):
        raise NotImplementedError(
            f"pages of {page} slots in {keys.dtype}: allowed are powers of two from {packed} on"
        )
    if page_table.size * 4 > _MOST_TABLE_BYTES:
        raise NotImplementedError(
            f"a page table of {page_table.size} entries: allowed are {_MOST_TABLE_BYTES // 4}"
        )
    per_block = max(1, min(_block(size, keys.dtype), -(-pages * page // _LANES) * _LANES) // page)
    block = per_block * page
    # Positions are gathered beforehand: 4 bytes per slot of capacity, in lanes.
    slots = pad_to(reference.slot_positions(positions, page_table, lengths), block, 2, fill=-1)
    width = slots.shape[2]
    grouped, ranges, tile, most = _tiled(queries, query_positions, kv_heads, window, with_logits)
    tiles = grouped.shape[2] // tile
    if with_logits and tile * width * 4 > _MOST_LOGITS_BYTES:
        raise NotImplementedError(
            f"logits of {tile} rows over {width} slots: allowed are {_MOST_LOGITS_BYTES // 4} in all"
        )
    steps = batch * kv_heads * tiles

    def attend(lengths_ref: Any, table_ref: Any, *refs: Any) -> None:
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

        _begin(state)
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
            here = pl.ds(pl.multiple_of(index * block, _LANES), block)
            filled = length - index * block
            logits = _logits(
                q_ref[0, 0], k_buffer[buffer], at_ref[0, 0, :, here], range_ref[0], filled
            )
            if logits_ref is not None:
                logits_ref[0, 0, :, here] = logits
            _add(state, logits, v_buffer[buffer])

        @pl.when((blocks == 0) & (step + 1 < steps))
        def _() -> None:
            start(following, 0, first)

        turn_ref[0] = (first + blocks) % 2
        _finish(state, out_ref, lse_ref)

    def rows_at(row: Any, head: Any, at: Any, *_: Any) -> tuple[Any, ...]:
        return row, head, at, 0

    def head_at(row: Any, head: Any, at: Any, *_: Any) -> tuple[Any, ...]:
        return row, head, 0, 0

    out_specs = [pl.BlockSpec((1, 1, tile, size), rows_at), pl.BlockSpec((1, 1, tile, 1), rows_at)]
    out_shape = _results(grouped)
    if with_logits:
        out_specs.append(pl.BlockSpec((1, 1, tile, width), rows_at))
        out_shape.append(jax.ShapeDtypeStruct((*grouped.shape[:3], width), jnp.float32))
    results = pl.pallas_call(
        attend,
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
                *_state(tile, size),
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
    return _unpacked(results, queries, lengths, pages * page, most)


def _check(queries: Array, keys: Array) -> None:
    dtype = keys.dtype
    if dtype not in (jnp.bfloat16, jnp.float32) or queries.dtype != dtype:
        raise NotImplementedError(
            f"queries in {queries.dtype} over keys in {dtype}: allowed are bfloat16 and float32, "
            "the same for both"
        )
    if keys.shape[-1] % 8 or keys.shape[-1] > 256:
        raise NotImplementedError(
            f"head size {keys.shape[-1]}: allowed are multiples of 8 up to 256"
        )


def _block(size: int, dtype: Any) -> int:
    """Slots of a block: a multiple of the lanes, and few enough for four of them in VMEM."""
    lanes = -(-size // _LANES) * _LANES
    return max(_LANES, min(1024, _BUFFER_BYTES // (lanes * jnp.dtype(dtype).itemsize)))


def _tiled(
    queries: Array, query_positions: Array, kv_heads: int, window: Any, with_logits: bool
) -> tuple[Array, Array, int, int]:
    """Rows of queries [B, K, R, D], what they see [B, R, 2], rows per tile, and rows that count."""
    wanted = queries.shape[1] // kv_heads * queries.shape[2]
    if with_logits and wanted > 8:
        raise NotImplementedError(
            f"logits of {wanted} queries per KV head: allowed are up to 8, beyond that a second "
            "pass over the keys moves fewer bytes"
        )
    packed = 8 * (4 // queries.dtype.itemsize)
    tile = min(_TILE, -(-wanted // packed) * packed)
    grouped = rows.query_rows(queries, kv_heads, tile)
    ranges = rows.row_ranges(query_positions, queries.shape[1] // kv_heads, window, tile)
    return grouped, jnp.stack(ranges, axis=-1), tile, wanted


def _state(tile: int, size: int) -> list[Any]:
    """Scratch of a softmax in progress: output, largest logit, sum of weights."""
    column = pltpu.VMEM((tile, _LANES), jnp.float32)
    return [pltpu.VMEM((tile, size), jnp.float32), column, column]


def _begin(state: Any) -> None:
    out, largest, total = state
    out[...] = jnp.zeros_like(out)
    largest[...] = jnp.full_like(largest, -1e30)
    total[...] = jnp.zeros_like(total)


def _logits(queries: Array, keys: Array, slots: Array, ranges: Array, filled: Array) -> Array:
    """Logits [R, block], -inf for what a row does not see and from slot `filled` on."""
    products = _product(queries, keys, ((1,), (1,))) * queries.shape[-1] ** -0.5
    place = lax.broadcasted_iota(jnp.int32, products.shape, 1)
    seen = (slots <= ranges[:, 0:1]) & (slots > ranges[:, 1:2]) & (place < filled)
    return jnp.where(seen, products, -jnp.inf)


def _add(state: Any, logits: Array, values: Array) -> None:
    out, largest, total = state
    before = largest[:, 0:1]
    now = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
    weights, shrink = jnp.exp(logits - now), jnp.exp(before - now)
    added = _product(weights.astype(values.dtype), values, ((1,), (0,)))
    out[...] = out[...] * shrink + added
    largest[...] = jnp.broadcast_to(now, largest.shape)
    sums = total[:, 0:1] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    total[...] = jnp.broadcast_to(sums, total.shape)


def _finish(state: Any, out_ref: Any, lse_ref: Any) -> None:
    out, largest, total = state
    sums = total[:, 0:1]
    out_ref[0, 0] = (out[...] / jnp.maximum(sums, 1e-30)).astype(out_ref.dtype)
    lse = largest[:, 0:1] + jnp.log(jnp.maximum(sums, 1e-30))
    lse_ref[0, 0] = jnp.where(sums > 0, lse, -jnp.inf)


def _product(a: Array, b: Array, contracted: tuple[tuple[int], tuple[int]]) -> Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _results(grouped: Array) -> list[jax.ShapeDtypeStruct]:
    lse = (*grouped.shape[:3], 1)
    return [
        jax.ShapeDtypeStruct(grouped.shape, grouped.dtype),
        jax.ShapeDtypeStruct(lse, jnp.float32),
    ]


def _unpacked(
    results: Any, queries: Array, lengths: Array, slots: int, wanted: int
) -> tuple[Any, ...]:
    out, lse, *logits = results
    found = rows.from_rows(out, lse[..., 0], queries)
    if not logits:
        return *found, None
    given = logits[0][:, :, :wanted]
    return *found, rows.logits_from_rows(given, lengths, queries.shape[1], slots)
