"""Decode attention over a padded cache, the blocks behind a head's length skipped (TPU)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from kernels_pallas import lowering
from kernels_pallas.ragged_decode import mosaic_tpu_layout as layout
from kernels_pallas.ragged_decode import mosaic_tpu_softmax as softmax


def attend(
    queries: Array,
    cache: tuple[Array, Array, Array, Array],
    query_positions: Array,
    window: int | Array,
    *,
    with_logits: bool,
) -> tuple[Any, ...]:
    keys, values, positions, lengths = cache
    batch, kv_heads, slots, size = keys.shape
    layout.check(queries, keys)
    block = min(layout.block(size, keys.dtype), -(-slots // layout.LANES) * layout.LANES)
    blocks = pl.cdiv(slots, block)
    grouped, ranges, tile, most = layout.tiled(
        queries, query_positions, kv_heads, window, with_logits
    )

    def last(row: Array, head: Array, lengths_ref: Any) -> Array:
        return jnp.maximum(pl.cdiv(lengths_ref[row, head], block) - 1, 0)

    def slots_at(row: Any, head: Any, at: Any, index: Any, lengths_ref: Any) -> tuple[Any, ...]:
        return row, head, jnp.minimum(index, last(row, head, lengths_ref)), 0

    def positions_at(row: Any, head: Any, at: Any, index: Any, lengths_ref: Any) -> tuple[Any, ...]:
        return row, head, 0, jnp.minimum(index, last(row, head, lengths_ref))

    def kernel(lengths_ref: Any, *refs: Any) -> None:
        q_ref, range_ref, k_ref, v_ref, at_ref, out_ref, lse_ref, *others = refs
        logits_ref = others.pop(0) if with_logits else None
        row, head, _, index = (pl.program_id(axis) for axis in range(4))
        length = lengths_ref[row, head]
        state = tuple(others)

        @pl.when(index == 0)
        def _() -> None:
            softmax.begin(state)

        @pl.when(index * block < length)
        def _() -> None:
            filled = length - index * block
            value = v_ref[0, 0]
            if slots % block:
                # Behind the array's end lies anything, and 0 times anything may be NaN.
                row_of = lax.broadcasted_iota(jnp.int32, value.shape, 0)
                value = jnp.where(row_of < filled, value, jnp.zeros_like(value))
            logits = softmax.logits(q_ref[0, 0], k_ref[0, 0], at_ref[0, 0], range_ref[0], filled)
            if logits_ref is not None:
                logits_ref[0, 0] = logits
            softmax.add(state, logits, value)

        @pl.when(index == blocks - 1)
        def _() -> None:
            softmax.finish(state, out_ref, lse_ref)

    def rows_at(row: Any, head: Any, at: Any, *_: Any) -> tuple[Any, ...]:
        return row, head, at, 0

    out_specs = [pl.BlockSpec((1, 1, tile, size), rows_at), pl.BlockSpec((1, 1, tile, 1), rows_at)]
    out_shape = layout.results(grouped)
    if with_logits:
        spec = pl.BlockSpec(
            (1, 1, tile, block), lambda row, head, at, index, _: (row, head, at, index)
        )
        out_specs.append(spec)
        shape = (*grouped.shape[:3], blocks * block)
        out_shape.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    results = pl.pallas_call(
        kernel,
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
            scratch_shapes=softmax.scratch(tile, size),
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        interpret=lowering.tpu_interpret(),
    )(lengths, grouped, ranges, keys, values, positions[:, :, None])
    return layout.unpacked(results, queries, lengths, slots, most)
