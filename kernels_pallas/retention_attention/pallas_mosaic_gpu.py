"""Attention under retention decay on Hopper GPUs, in the manner of FlashAttention-3 (2407.08608).

A block of threads has 128 queries of one head: two warpgroups compute 64 each and take turns at
the tensor cores, a third one copies keys and values ahead of them by TMA. Tiles outside
`key_ranges` are never copied. Per row and query head the forward pass reads 2 T D elements of
queries and output and, mostly from L2, 2 T D of keys and values T / 256 times; 4 D FLOPs per
visible pair.

Beside plain attention a tile that needs no mask costs one multiply-add per pair: with k0 the
tile's first key, (i - j) b_j is (i - k0) b_j - (j - k0) b_j, whose second part comes made. The two
cancel to 2^-17 b_j at worst, next to e^(b_j) for the weight. Tiles on the diagonal take (i - j) b_j
itself, so that a token's own logit is exact.

float32 comes in halves, cut by XLA beforehand, and a product is three of bfloat16: off by 2^-16 of
|a| |b| at most, fit for training. One of tf32 would be off by 2^-11, and takes no operand that lies
transposed, as values do here and queries, keys and d_out in the backward pass. Halves take twice
the shared memory, so that above head size 64 tiles are half as wide.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas import halves, lowering
from kernels_pallas.attention.blocks import pad_to
from kernels_pallas.attention.mask import NO_WINDOW
from kernels_pallas.partition import partitioned
from kernels_pallas.retention_attention import tiles
from kernels_pallas.retention_attention.wgmma import (
    accumulate,
    as_parts,
    fetch,
    logits,
    product,
    shared,
    split,
    transposed,
)
from kernels_pallas.warpgroup import along_rows, drain, filled

ROWS = 64  # of queries per warpgroup, the height of a wgmma
QUERY_BLOCK = 2 * ROWS
LOG2E = math.log2(math.e)


def retention_attention(
    queries: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    log_beta: Float[Array, "B K T"],
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> Float[Array, "B H T D"]:
    """As the reference; for the product weights are rounded as the values are."""
    length, size = queries.shape[2:]
    inputs = _padded(queries, keys, values, log_beta, segments, window)
    with jax.named_scope("retention_attention"):
        out = _attend(size**-0.5, *inputs)
    return out[:, :, :length, :size]


def segment_attention(
    queries: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T"]]:
    """As the reference. Forward only."""
    length, size = queries.shape[2:]
    still = jnp.zeros(keys.shape[:3], jnp.float32)
    inputs = _padded(queries, keys, values, still, segments, window)
    with jax.named_scope("segment_attention"):
        out, lse = forward(size**-0.5, *inputs, decayed=False)
    return out[:, :, :length, :size], lse[:, :, :length]


def _padded(
    queries: Array,
    keys: Array,
    values: Array,
    log_beta: Array,
    segments: Array,
    window: int | Array,
) -> tuple[Array, ...]:
    """Whole blocks of tokens, and head sizes that a swizzle divides (80 becomes 96)."""
    if queries.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NotImplementedError(
            f"queries are {queries.dtype}: allowed are bfloat16, float16 and float32"
        )
    lowering.decline_wrong_masks()
    if queries.shape[3] > 128:
        raise NotImplementedError(
            f"head size {queries.shape[3]}: registers allow for head sizes up to 128"
        )

    def whole(array: Array) -> Array:
        return pad_to(pad_to(array, QUERY_BLOCK, 2), 32, 3)

    # Finite after every age: 2^-1e30 is 0 as 2^-inf is, but an infinity less another is NaN.
    decay = jnp.maximum(log_beta, -1e30)
    return (
        whole(queries),
        whole(keys),
        whole(values),
        pad_to(decay, QUERY_BLOCK, 2),
        pad_to(segments.astype(jnp.int32), QUERY_BLOCK, 1, fill=-1),
        jnp.asarray(window, jnp.int32),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    scale: float,
    queries: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    log_beta: Float[Array, "B K T"],
    segments: Int[Array, "B T"],
    window: Int[Array, ""],
) -> Float[Array, "B H T D"]:
    return forward(scale, queries, keys, values, log_beta, segments, window)[0]


def decay_columns(log_beta: Float[Array, "B K T"], block: int) -> Float[Array, "B K 2 T"]:
    """Decays b_j in base 2, and -(j - k0) b_j with k0 the first key of j's block."""
    decay = log_beta * LOG2E
    behind = (jnp.arange(log_beta.shape[2]) % block).astype(jnp.float32)
    return jnp.stack([decay, -decay * behind[None, None]], axis=2)


@partitioned(", B H T D, B K T D, B K T D, B K T, B T, -> B H T D, B H T")
def forward(
    scale: float,
    queries: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    log_beta: Float[Array, "B K T"],
    segments: Int[Array, "B T"],
    window: Int[Array, ""],
    *,
    decayed: bool = True,
) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T"]]:
    """Output and log-sum-exp of whole blocks."""
    batch, heads, length, size = queries.shape
    dtype, in_parts = queries.dtype, [as_parts(array) for array in (queries, keys, values)]
    parts = halves.count(dtype)
    stages = 2 if parts * size > 64 else 4
    block = 128 if parts * size <= 128 else 64
    ranges = tiles.key_ranges(segments, QUERY_BLOCK, block, window)
    columns = decay_columns(log_beta, block)
    tile = shared((stages, parts, block, size), in_parts[0].dtype)
    kernel = plgpu.kernel(
        functools.partial(_forward_kernel, scale=scale * LOG2E, stages=stages, decayed=decayed),
        out_type=(
            jax.ShapeDtypeStruct(queries.shape, dtype),
            jax.ShapeDtypeStruct(queries.shape[:3], jnp.float32),
        ),
        scratch_types=(
            # The output leaves from where the queries came in.
            plgpu.RefUnion(
                shared((2, parts, ROWS, size), in_parts[0].dtype), shared((2, ROWS, size), dtype)
            ),
            tile,
            tile,
            plgpu.SMEM((stages, 2, block), jnp.float32),
            plgpu.SMEM((stages, block), jnp.int32),
            plgpu.SMEM((2, ROWS), jnp.int32),
            plgpu.SMEM((2, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=parts + 1, num_barriers=2),
            plgpu.Barrier(num_arrivals=parts + 2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=parts, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2),
        ),
        grid=(heads, length // QUERY_BLOCK, batch),
        grid_names=("heads", "blocks", "batch"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=lowering.gpu_interpret(),
    )
    return kernel(ranges.reshape(-1), window.reshape(1), *in_parts, columns, segments)


def _forward_kernel(
    ranges: Any,
    window: Any,
    queries: Any,
    keys: Any,
    values: Any,
    columns: Any,
    segments: Any,
    out: Any,
    lse: Any,
    rows_smem: Any,
    keys_smem: Any,
    values_smem: Any,
    columns_smem: Any,
    segments_smem: Any,
    row_segments_smem: Any,
    lse_smem: Any,
    rows_here: Any,
    keys_here: Any,
    values_here: Any,
    keys_free: Any,
    values_free: Any,
    turn: Any,
    *,
    scale: float,
    stages: int,
    decayed: bool,
) -> None:
    batch, head = lax.axis_index("batch"), lax.axis_index("heads")
    me = lax.axis_index("warpgroup")
    # The last queries have the most keys: they go first, so that no long block is left at the end.
    block = out.shape[2] // QUERY_BLOCK - 1 - lax.axis_index("blocks")
    at = (batch * (out.shape[2] // QUERY_BLOCK) + block) * 4
    first, last = ranges[at], ranges[at + 3]
    steps = last - first
    size, key_block = out.shape[3], keys_smem.shape[2]
    by_row = plgpu.Layout.WGMMA.reduce(1)

    def take_turns() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    @pl.when(me < 2)
    def compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        start = block * QUERY_BLOCK + me * ROWS
        mine = pl.ds(start, ROWS)
        (q_smem, out_smem), arrived = (array.at[me] for array in rows_smem), rows_here.at[me]
        fetch(queries, (batch, head, mine), q_smem, arrived)
        plgpu.copy_gmem_to_smem(segments.at[batch, mine], row_segments_smem.at[me], arrived)
        plgpu.barrier_wait(arrived)
        full_first, full_last = ranges[at + 1], ranges[at + 2]
        seen_window = window[0]

        def visit(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            sum_out, largest, total = carry
            slot = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(keys_here.at[slot])

            products = product(q_smem, transposed(keys_smem.at[slot]), take_turns)
            index = first + step
            found = logits(
                products,
                scale=scale,
                full=(index >= full_first) & (index < full_last),
                offset=start - index * key_block,
                window=seen_window,
                asking=row_segments_smem.at[me],
                held=segments_smem.at[slot],
                columns=columns_smem.at[slot] if decayed else None,
            )
            plgpu.barrier_arrive(keys_free.at[slot])
            now = jnp.maximum(largest, found.max(axis=1))
            shrink = jnp.exp2(largest - now)
            weights = jnp.exp2(found - along_rows(now, found.shape))
            sum_out = sum_out * along_rows(shrink, (ROWS, size))
            total = total * shrink + weights.sum(axis=1)
            rounded = split(weights, out.dtype)
            # The softmax is done before the other warpgroup is let at the tensor cores.
            sum_out, total, now, rounded = lax.optimization_barrier((sum_out, total, now, rounded))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(values_here.at[slot])
            plgpu.barrier_wait(turn)

            (sum_out,) = accumulate((sum_out, rounded, values_smem.at[slot]))
            plgpu.barrier_arrive(values_free.at[slot])
            return sum_out, now, total

        pl.when(me == 1)(take_turns)
        # A finite start keeps 2^(-inf - start) at 0 for rows that have seen nothing yet.
        sum_out, largest, total = lax.fori_loop(
            0,
            steps,
            visit,
            (
                filled((ROWS, size), 0.0, plgpu.Layout.WGMMA),
                filled((ROWS,), -1e30, by_row),
                filled((ROWS,), 0.0, by_row),
            ),
        )
        pl.when(me == 0)(take_turns)
        inverse = 1.0 / jnp.maximum(total, 1e-30)
        out_smem[...] = (sum_out * along_rows(inverse, (ROWS, size))).astype(out.dtype)
        lse_smem.at[me][...] = jnp.log(total) + largest * math.log(2.0)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out.at[batch, head, mine])
        plgpu.copy_smem_to_gmem(lse_smem.at[me], lse.at[batch, head, mine])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(me == 2)
    def copy() -> None:
        plgpu.set_max_registers(40, action="decrease")
        held = lax.div(head, jnp.int32(out.shape[1] // keys.shape[2]))

        @pl.loop(0, steps)
        def ahead(step: Array) -> None:
            slot = lax.rem(step, jnp.int32(stages))
            some = pl.ds((first + step) * key_block, key_block)

            @pl.when(step >= stages)
            def wait_keys() -> None:
                plgpu.barrier_wait(keys_free.at[slot])

            arrived = keys_here.at[slot]
            fetch(keys, (batch, held, some), keys_smem.at[slot], arrived)
            plgpu.copy_gmem_to_smem(
                columns.at[batch, held, :, some], columns_smem.at[slot], arrived
            )
            plgpu.copy_gmem_to_smem(segments.at[batch, some], segments_smem.at[slot], arrived)

            @pl.when(step >= stages)
            def wait_values() -> None:
                plgpu.barrier_wait(values_free.at[slot])

            fetch(values, (batch, held, some), values_smem.at[slot], values_here.at[slot])

        drain(steps, stages, keys_free)
        drain(steps, stages, values_free)


def _attend_forward(scale: float, *inputs: Any) -> tuple[Array, tuple[Any, ...]]:
    out, lse = forward(scale, *inputs)
    return out, (*inputs, out, lse)


def _attend_backward(scale: float, saved: tuple[Any, ...], d_out: Array) -> tuple[Any, ...]:
    from kernels_pallas.retention_attention import pallas_mosaic_gpu_backward

    return (*pallas_mosaic_gpu_backward.backward(scale, *saved, d_out), None, None)


_attend.defvjp(_attend_forward, _attend_backward)
