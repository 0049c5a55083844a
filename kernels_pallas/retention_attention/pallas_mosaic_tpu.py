"""Attention under retention decay on TPU: FlashAttention, a KV head's query heads together.

A program holds one block of queries of all G heads, (G * query block) rows, so that keys, values,
ages and decays are read and made once for the group. Per row of the batch and KV head the forward
pass reads 2 G T D elements of queries and output, and 2 T D of keys and values T / (2 query block)
times; 4 D FLOPs per visible pair and query head. Tiles outside `key_ranges` move nothing: their
grid steps name the block that is already there.
"""

from __future__ import annotations

import functools
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
from kernels_pallas.partition import partitioned
from kernels_pallas.retention_attention import tiles

LANES = 128
_ROWS = 1024  # of a block of queries, all heads of the group: 2 MiB of float32 logits
KEY_BLOCK = 512
VMEM_BYTES = 64 * 2**20


def retention_attention(
    queries: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    log_beta: Float[Array, "B K T"],
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> Float[Array, "B H T D"]:
    """As the reference; products of float32 operands in float32 (six bfloat16 passes)."""
    length = queries.shape[2]
    inputs = _padded(queries, keys, values, log_beta, segments, window)
    with jax.named_scope("retention_attention"):
        out = _attend(*inputs)
    return out[:, :, :, :length].reshape(queries.shape)


def segment_attention(
    queries: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T"]]:
    """As the reference. Forward only."""
    length = queries.shape[2]
    still = jnp.zeros(keys.shape[:3], jnp.float32)
    inputs = _padded(queries, keys, values, still, segments, window)
    with jax.named_scope("segment_attention"):
        out, lse = forward(*inputs, decayed=False)
    out = out[:, :, :, :length].reshape(queries.shape)
    return out, lse[:, :, :, :length].reshape(queries.shape[:3])


def _padded(
    queries: Array,
    keys: Array,
    values: Array,
    log_beta: Array,
    segments: Array,
    window: int | Array,
) -> tuple[Array, ...]:
    """Whole blocks of tokens, queries as [B, K, G, T, D]."""
    if queries.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"queries are {queries.dtype}: the matrix unit takes bfloat16 and float32"
        )
    if queries.shape[1] // keys.shape[1] > 32:
        raise NotImplementedError(
            f"{queries.shape[1] // keys.shape[1]} query heads per KV head: allowed are up to 32"
        )
    batch, kv_heads, length, size = keys.shape
    multiple = LANES if length <= KEY_BLOCK else KEY_BLOCK
    # The lowest finite number for -inf, of which age 0 would make NaN.
    decay = jnp.maximum(log_beta, jnp.finfo(jnp.float32).min)
    return (
        pad_to(queries.reshape(batch, kv_heads, -1, length, size), multiple, 3),
        pad_to(keys, multiple, 2),
        pad_to(values, multiple, 2),
        pad_to(decay, multiple, 2),
        pad_to(segments.astype(jnp.int32), multiple, 1, fill=-1),
        jnp.asarray(window, jnp.int32),
    )


def block_of(length: int, most: int) -> int:
    """The largest multiple of 128 that divides `length` and is at most `most`, which is >= 128."""
    return next(b for b in range(most // LANES * LANES, 0, -LANES) if length % b == 0)


def query_block_of(group: int, length: int) -> int:
    return block_of(length, min(KEY_BLOCK, max(LANES, _ROWS // group)))


@jax.custom_vjp
def _attend(
    queries: Float[Array, "B K G T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    log_beta: Float[Array, "B K T"],
    segments: Int[Array, "B T"],
    window: Int[Array, ""],
) -> Float[Array, "B K G T D"]:
    return forward(queries, keys, values, log_beta, segments, window)[0]


@partitioned("B K G T D, B K T D, B K T D, B K T, B T, -> B K G T D, B K G T")
def forward(
    queries: Float[Array, "B K G T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    log_beta: Float[Array, "B K T"],
    segments: Int[Array, "B T"],
    window: Int[Array, ""],
    *,
    decayed: bool = True,
) -> tuple[Float[Array, "B K G T D"], Float[Array, "B K G T"]]:
    """Output and log-sum-exp of whole blocks."""
    batch, kv_heads, group, length, size = queries.shape
    query_block = query_block_of(group, length)
    key_block = block_of(length, KEY_BLOCK)
    query_blocks, key_blocks = length // query_block, length // key_block
    ranges = tiles.key_ranges(segments, query_block, key_block, window).reshape(-1)

    def key_index(b: Any, i: Any, step: Any, ranges: Any) -> Any:
        at = (b * query_blocks + i) * 4
        return jnp.minimum(ranges[at] + step, jnp.maximum(ranges[at + 3] - 1, 0))

    queries_spec = pl.BlockSpec(
        (1, 1, group, query_block, size), lambda b, h, i, step, ranges, window: (b, h, 0, i, 0)
    )
    keys_spec = pl.BlockSpec(
        (1, 1, key_block, size),
        lambda b, h, i, step, ranges, window: (b, h, key_index(b, i, step, ranges), 0),
    )
    rows = group * query_block
    pairs = batch * kv_heads * group * length * length // 2
    return pl.pallas_call(
        functools.partial(_forward_kernel, query_blocks=query_blocks, decayed=decayed),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads, query_blocks, key_blocks),
            in_specs=[
                queries_spec,
                keys_spec,
                keys_spec,
                pl.BlockSpec(
                    (1, 1, 1, key_block),
                    lambda b, h, i, step, ranges, window: (
                        b,
                        h,
                        0,
                        key_index(b, i, step, ranges),
                    ),
                ),
                pl.BlockSpec((1, 1, query_block), lambda b, h, i, step, ranges, window: (b, 0, i)),
                pl.BlockSpec(
                    (1, 1, key_block),
                    lambda b, h, i, step, ranges, window: (b, 0, key_index(b, i, step, ranges)),
                ),
            ],
            out_specs=[
                queries_spec,
                pl.BlockSpec(
                    (1, 1, group, query_block),
                    lambda b, h, i, step, ranges, window: (b, h, 0, i),
                ),
            ],
            scratch_shapes=[
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, size), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            jax.ShapeDtypeStruct(queries.shape[:4], jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * size * pairs,
            transcendentals=pairs,
            bytes_accessed=2 * queries.nbytes
            + (keys.nbytes + values.nbytes) * max(1, query_blocks // 2),
        ),
        interpret=lowering.tpu_interpret(),
        name="retention_attention",
    )(
        ranges,
        window.reshape(1),
        queries,
        keys,
        values,
        log_beta[:, :, None],
        segments[:, None],
        segments[:, None],
    )


def column(row: Array) -> Array:
    """A row [1, N] as a column [N, 1]: the hardware turns whole tiles."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def dot(a: Array, b: Array, over: tuple[int, int]) -> Array:
    """The matrix product over one axis of each, in float32."""
    exact = a.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((over[0],), (over[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _forward_kernel(
    ranges: Any,
    window: Any,
    queries: Any,
    keys: Any,
    values: Any,
    log_beta: Any,
    query_segments: Any,
    key_segments: Any,
    out: Any,
    lse: Any,
    largest: Any,
    total: Any,
    sum_out: Any,
    *,
    query_blocks: int,
    decayed: bool,
) -> None:
    group, query_block, size = queries.shape[2:]
    key_block = keys.shape[2]
    i, step = pl.program_id(2), pl.program_id(3)
    at = (pl.program_id(0) * query_blocks + i) * 4
    index = ranges[at] + step

    @pl.when(step == 0)
    def start() -> None:
        # A finite start keeps exp(-inf - start) at 0 for rows that have seen nothing yet.
        largest[...] = jnp.full(largest.shape, -1e30, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        sum_out[...] = jnp.zeros(sum_out.shape, jnp.float32)

    def visit(masked: bool) -> None:
        q = queries[0, 0].reshape(group * query_block, size)
        logits = dot(q, keys[0, 0], (1, 1)) * jnp.float32(size**-0.5)
        logits = logits.reshape(group, query_block, key_block)
        shape = (query_block, key_block)
        if masked or decayed:
            age = i * query_block - index * key_block
            age = age + lax.broadcasted_iota(jnp.int32, shape, 0)
            age = age - lax.broadcasted_iota(jnp.int32, shape, 1)
        if decayed:
            logits = logits + (age.astype(jnp.float32) * log_beta[0, 0])[None]
        if masked:
            asking = column(query_segments[0])
            seen = (asking == key_segments[0]) & (asking >= 0) & (age >= 0) & (age < window[0])
            logits = jnp.where(seen[None], logits, -jnp.inf)
        logits = logits.reshape(group * query_block, key_block)
        before = largest[:, :1]
        now = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
        weights = jnp.exp(logits - now)
        shrink = jnp.exp(before - now)
        grown = total[:, :1] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        total[...] = jnp.broadcast_to(grown, total.shape)
        largest[...] = jnp.broadcast_to(now, largest.shape)
        v = values[0, 0]
        sum_out[...] = sum_out[...] * shrink + dot(weights.astype(v.dtype), v, (1, 0))

    there = index < ranges[at + 3]
    full = (index >= ranges[at + 1]) & (index < ranges[at + 2])
    pl.when(there & full)(lambda: visit(masked=False))
    pl.when(there & ~full)(lambda: visit(masked=True))

    @pl.when(step == pl.num_programs(3) - 1)
    def finish() -> None:
        share = sum_out[...] / jnp.maximum(total[:, :1], 1e-30)
        out[0, 0] = share.astype(out.dtype).reshape(group, query_block, size)
        found = jnp.log(total[...]) + largest[...]
        for head in range(group):
            part = found[head * query_block : (head + 1) * query_block]
            lse[0, 0, head : head + 1] = part.T[:1]


def _attend_forward(*inputs: Any) -> tuple[Array, tuple[Any, ...]]:
    out, lse = forward(*inputs)
    return out, (*inputs, out, lse)


def _attend_backward(saved: tuple[Any, ...], d_out: Array) -> tuple[Any, ...]:
    from kernels_pallas.retention_attention import pallas_mosaic_tpu_backward

    return (*pallas_mosaic_tpu_backward.backward(*saved, d_out), None, None)


_attend.defvjp(_attend_forward, _attend_backward)
