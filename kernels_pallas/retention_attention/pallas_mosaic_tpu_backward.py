"""The backward pass of attention under retention decay on TPU: two kernels that make tiles again.

One goes over the keys of a block of queries, for their gradient; one over the queries of a block
of keys, all heads of the group, for those of keys, values and decays. The second has its tiles
transposed, keys by queries: log-sum-exps then lie along the tile as they lie in memory. Together
14 D FLOPs per visible pair and query head; reads as the forward pass, twice, and the outputs'
gradient with the queries.
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
from kernels_pallas.partition import partitioned
from kernels_pallas.retention_attention import tiles
from kernels_pallas.retention_attention.pallas_mosaic_tpu import (
    KEY_BLOCK,
    LANES,
    VMEM_BYTES,
    block_of,
    column,
    dot,
    query_block_of,
)


@partitioned(
    "B K G T D, B K T D, B K T D, B K T, B T, , B K G T D, B K G T, B K G T D"
    "-> B K G T D, B K T D, B K T D, B K T"
)
def backward(
    queries: Float[Array, "B K G T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    log_beta: Float[Array, "B K T"],
    segments: Int[Array, "B T"],
    window: Int[Array, ""],
    out: Float[Array, "B K G T D"],
    lse: Float[Array, "B K G T"],
    d_out: Float[Array, "B K G T D"],
) -> tuple[Array, Array, Array, Array]:
    """Gradients of queries, keys, values and log_beta from the saved forward pass."""
    offset = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # Rows that see nothing have -inf in their logits too, whose difference would be NaN.
    lse = jnp.maximum(lse, -1e30)
    group, length = queries.shape[2:4]
    query_block = query_block_of(group, length)
    key_block = block_of(length, KEY_BLOCK)
    arrays = (
        queries,
        d_out,
        lse,
        offset,
        keys,
        values,
        log_beta[:, :, None],
        segments[:, None],
        segments[:, None],
    )
    blocks = (query_block, key_block)
    ranges = tiles.key_ranges(segments, *blocks, window)
    (d_queries,) = _call(_queries_kernel, False, blocks, ranges, window, arrays)
    ranges = tiles.query_ranges(segments, *blocks, window)
    d_keys, d_values, d_log_beta = _call(_keys_kernel, True, blocks, ranges, window, arrays)
    return d_queries, d_keys, d_values, d_log_beta[:, :, 0]


def _call(
    kernel: Callable[..., None],
    over_queries: bool,
    blocks: tuple[int, int],
    ranges: Int[Array, "B N 4"],
    window: Int[Array, ""],
    arrays: tuple[Array, ...],
) -> Any:
    """One of the kernels: each program owns a block of one side and visits those of the other."""
    queries, keys = arrays[0], arrays[4]
    batch, kv_heads, group, length, size = queries.shape
    query_block, key_block = blocks
    owned = ranges.shape[1]
    rows = group * query_block

    def other(b: Any, own: Any, step: Any, ranges: Any) -> Any:
        at = (b * owned + own) * 4
        return jnp.minimum(ranges[at] + step, jnp.maximum(ranges[at + 3] - 1, 0))

    def spec(shape: tuple[int, ...], of_queries: bool, index: Callable[..., Any]) -> pl.BlockSpec:
        def index_map(b: Any, h: Any, own: Any, step: Any, ranges: Any, window: Any) -> Any:
            place = other(b, own, step, ranges) if of_queries is over_queries else own
            return index(b, h, place)

        return pl.BlockSpec(shape, index_map)

    def wide(b: Any, h: Any, place: Any) -> Any:
        return b, h, 0, place, 0

    def tall(b: Any, h: Any, place: Any) -> Any:
        return b, h, place, 0

    def line(b: Any, h: Any, place: Any) -> Any:
        return b, h, 0, place

    def shared(b: Any, h: Any, place: Any) -> Any:
        return b, 0, place

    heads_spec = spec((1, 1, group, query_block, size), True, wide)
    rows_spec = spec((1, 1, group, query_block), True, line)
    keys_spec = spec((1, 1, key_block, size), False, tall)
    decay_spec = spec((1, 1, 1, key_block), False, line)
    like_queries = jax.ShapeDtypeStruct(queries.shape, queries.dtype)
    like_keys = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    f32 = jnp.float32
    if over_queries:
        out_specs = [keys_spec, keys_spec, decay_spec]
        out_shape = [like_keys, like_keys, jax.ShapeDtypeStruct(arrays[6].shape, f32)]
        scratch = [(key_block, size), (key_block, size), (key_block, LANES), (key_block, LANES)]
    else:
        out_specs, out_shape = [heads_spec], [like_queries]
        scratch = [(rows, size), (rows, LANES), (rows, LANES)]
    pairs = batch * kv_heads * group * length * length // 2
    return pl.pallas_call(
        functools.partial(kernel, owned=owned, blocks=blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads, owned, length // (query_block if over_queries else key_block)),
            in_specs=[
                heads_spec,
                heads_spec,
                rows_spec,
                rows_spec,
                keys_spec,
                keys_spec,
                decay_spec,
                spec((1, 1, query_block), True, shared),
                spec((1, 1, key_block), False, shared),
            ],
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM(shape, f32) for shape in scratch],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
        ),
        cost_estimate=pl.CostEstimate(
            flops=(8 if over_queries else 6) * size * pairs,
            transcendentals=pairs,
            bytes_accessed=2 * queries.nbytes + 2 * keys.nbytes * (length // query_block),
        ),
        interpret=lowering.tpu_interpret(),
        name="retention_attention_keys" if over_queries else "retention_attention_queries",
    )(ranges.reshape(-1), window.reshape(1), *arrays)


def _steps(
    ranges: Any, owned: int, start: Callable[[], None], visit: Callable[[Any, bool], None]
) -> None:
    """`start` at a program's first step, and `visit(block, masked)` at each of its tiles."""
    at = (pl.program_id(0) * owned + pl.program_id(2)) * 4
    step = pl.program_id(3)
    index = ranges[at] + step
    pl.when(step == 0)(start)
    there = index < ranges[at + 3]
    full = (index >= ranges[at + 1]) & (index < ranges[at + 2])
    pl.when(there & full)(lambda: visit(index, False))
    pl.when(there & ~full)(lambda: visit(index, True))


def _queries_kernel(
    ranges: Any,
    window: Any,
    queries: Any,
    d_out: Any,
    lse: Any,
    offset: Any,
    keys: Any,
    values: Any,
    log_beta: Any,
    query_segments: Any,
    key_segments: Any,
    d_queries: Any,
    total: Any,
    lse_column: Any,
    offset_column: Any,
    *,
    owned: int,
    blocks: tuple[int, int],
) -> None:
    """d q_i = sum_j dz_ij k_j / sqrt(D) with dz = p (d_out v - d_out out)."""
    query_block, key_block = blocks
    group, size = queries.shape[2], queries.shape[4]
    rows = group * query_block

    def start() -> None:
        total[...] = jnp.zeros(total.shape, jnp.float32)
        for head in range(group):
            part = slice(head * query_block, (head + 1) * query_block)
            for row, turned in ((lse, lse_column), (offset, offset_column)):
                wide = jnp.broadcast_to(row[0, 0, head : head + 1], (LANES, query_block))
                turned[part] = wide.T

    def visit(index: Any, masked: bool) -> None:
        k = keys[0, 0]
        logits = dot(queries[0, 0].reshape(rows, size), k, (1, 1)) * jnp.float32(size**-0.5)
        age = pl.program_id(2) * query_block - index * key_block
        age = age + lax.broadcasted_iota(jnp.int32, blocks, 0)
        age = age - lax.broadcasted_iota(jnp.int32, blocks, 1)
        bias = age.astype(jnp.float32) * log_beta[0, 0]
        logits = logits.reshape(group, *blocks) + bias[None]
        if masked:
            asking = column(query_segments[0])
            seen = (asking == key_segments[0]) & (asking >= 0) & (age >= 0) & (age < window[0])
            logits = jnp.where(seen[None], logits, -jnp.inf)
        weights = jnp.exp(logits.reshape(rows, key_block) - lse_column[:, :1])
        d_weights = dot(d_out[0, 0].reshape(rows, size), values[0, 0], (1, 1))
        d_logits = weights * (d_weights - offset_column[:, :1])
        d_scaled = (d_logits * jnp.float32(size**-0.5)).astype(k.dtype)
        total[...] = total[...] + dot(d_scaled, k, (1, 0))

    _steps(ranges, owned, start, visit)

    @pl.when(pl.program_id(3) == pl.num_programs(3) - 1)
    def finish() -> None:
        found = total[...].astype(d_queries.dtype)
        d_queries[0, 0] = found.reshape(group, query_block, size)


def _keys_kernel(
    ranges: Any,
    window: Any,
    queries: Any,
    d_out: Any,
    lse: Any,
    offset: Any,
    keys: Any,
    values: Any,
    log_beta: Any,
    query_segments: Any,
    key_segments: Any,
    d_keys: Any,
    d_values: Any,
    d_log_beta: Any,
    sum_keys: Any,
    sum_values: Any,
    sum_decays: Any,
    decay_column: Any,
    *,
    owned: int,
    blocks: tuple[int, int],
) -> None:
    """Of tiles [key, query]: d v_j = sum_i p_ij d_out_i, d k_j = sum_i dz_ij q_i / sqrt(D), and

    d log_beta_j = sum_i dz_ij (i - j).
    """
    query_block, key_block = blocks
    group, size = queries.shape[2], queries.shape[4]
    shape = (key_block, query_block)
    scale = jnp.float32(size**-0.5)

    def start() -> None:
        for total in (sum_keys, sum_values, sum_decays):
            total[...] = jnp.zeros(total.shape, jnp.float32)
        decay_column[...] = jnp.broadcast_to(log_beta[0, 0], (LANES, key_block)).T

    def visit(index: Any, masked: bool) -> None:
        k, v = keys[0, 0], values[0, 0]
        age = index * query_block - pl.program_id(2) * key_block
        age = age + lax.broadcasted_iota(jnp.int32, shape, 1)
        age = age - lax.broadcasted_iota(jnp.int32, shape, 0)
        bias = age.astype(jnp.float32) * decay_column[:, :1]
        if masked:
            held, asking = column(key_segments[0]), query_segments[0]
            seen = (asking == held) & (held >= 0) & (age >= 0) & (age < window[0])
        aged = jnp.zeros(shape, jnp.float32)
        for head in range(group):
            q, d_o = queries[0, 0, head], d_out[0, 0, head]
            logits = dot(k, q, (1, 1)) * scale + bias
            if masked:
                logits = jnp.where(seen, logits, -jnp.inf)
            weights = jnp.exp(logits - lse[0, 0, head : head + 1])
            sum_values[...] = sum_values[...] + dot(weights.astype(d_o.dtype), d_o, (1, 0))
            d_weights = dot(v, d_o, (1, 1))
            d_logits = weights * (d_weights - offset[0, 0, head : head + 1])
            aged = aged + d_logits
            sum_keys[...] = sum_keys[...] + dot((d_logits * scale).astype(q.dtype), q, (1, 0))
        added = jnp.sum(aged * age.astype(jnp.float32), axis=1, keepdims=True)
        sum_decays[...] = sum_decays[...] + jnp.broadcast_to(added, sum_decays.shape)

    _steps(ranges, owned, start, visit)

    @pl.when(pl.program_id(3) == pl.num_programs(3) - 1)
    def finish() -> None:
        d_keys[0, 0] = sum_keys[...].astype(d_keys.dtype)
        d_values[0, 0] = sum_values[...].astype(d_values.dtype)
        d_log_beta[0, 0] = sum_decays[...].T[:1]
