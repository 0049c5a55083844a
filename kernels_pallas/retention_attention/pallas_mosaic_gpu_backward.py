"""The backward pass of attention under retention decay on Hopper GPUs: tiles are made again.

One kernel goes over the keys of 128 queries of a head, for their gradient; the other over the
queries of 128 keys, for those of keys, values and decays. Two warpgroups compute, 64 rows each, a
third copies ahead of them. Together 14 D FLOPs per visible pair and query head, three times that
for the halves of float32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas import lowering
from kernels_pallas.partition import partitioned
from kernels_pallas.retention_attention import tiles
from kernels_pallas.retention_attention.pallas_mosaic_gpu import LOG2E, ROWS, decay_columns
from kernels_pallas.retention_attention.pallas_mosaic_gpu_backward_keys import (
    OWN,
    STAGES,
    keys_gradients,
    tokens_of_step,
)
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
from kernels_pallas.warpgroup import BY_ROW, along_rows, drain, filled


@partitioned(
    ", B H T D, B K T D, B K T D, B K T, B T, , B H T D, B H T, B H T D"
    "-> B H T D, B K T D, B K T D, B K T"
)
def backward(
    scale: float,
    queries: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    log_beta: Float[Array, "B K T"],
    segments: Int[Array, "B T"],
    window: Int[Array, ""],
    out: Float[Array, "B H T D"],
    lse: Float[Array, "B H T"],
    d_out: Float[Array, "B H T D"],
) -> tuple[Array, Array, Array, Array]:
    """Gradients of queries, keys, values and log_beta from the saved forward pass."""
    offset = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # Rows that see nothing have -inf in their logits too, whose difference would be NaN.
    lse = jnp.maximum(lse, -1e30) * LOG2E
    # Numbers made from integers are slow, and registers scarce: a token's place in its block too.
    step = tokens_of_step(queries)
    place = (jnp.arange(lse.shape[2]) % step).astype(jnp.float32)
    place = jnp.broadcast_to(place[None, None], lse.shape)
    rows = jnp.stack([lse, -offset, place], axis=2)  # [B, H, 3, T]
    in_parts = [as_parts(array) for array in (queries, d_out, keys, values)]
    tensors = (*in_parts[:2], rows, *in_parts[2:])
    dtype = queries.dtype
    columns = decay_columns(log_beta, step)
    d_queries = _queries(scale, tensors, columns, segments, window, step=step, dtype=dtype)
    d_keys, d_values, d_log_beta = keys_gradients(
        scale, tensors, log_beta, segments, window, step=step, dtype=dtype
    )
    return d_queries, d_keys, d_values, d_log_beta


def _queries(
    scale: float,
    tensors: tuple[Array, ...],
    columns: Float[Array, "B K 2 T"],
    segments: Int[Array, "B T"],
    window: Int[Array, ""],
    *,
    step: int,
    dtype: Any,
) -> Float[Array, "B H T D"]:
    operand = tensors[0].dtype
    parts, batch, heads, length, size = tensors[0].shape
    ranges = tiles.key_ranges(segments, OWN, step, window)
    own = shared((2, parts, ROWS, size), operand, step)
    other = shared((STAGES, parts, step, size), operand, step)
    kernel = plgpu.kernel(
        functools.partial(_queries_kernel, scale=scale),
        out_type=jax.ShapeDtypeStruct((batch, heads, length, size), dtype),
        scratch_types=(
            (
                plgpu.RefUnion(own, shared((2, ROWS, size), dtype)),
                own,
                plgpu.SMEM((2, 3, ROWS), jnp.float32),
                plgpu.SMEM((2, ROWS), jnp.int32),
            ),
            (
                other,
                other,
                plgpu.SMEM((STAGES, 2, step), jnp.float32),
                plgpu.SMEM((STAGES, step), jnp.int32),
            ),
            plgpu.Barrier(num_arrivals=2 * parts + 2, num_barriers=2),
            plgpu.Barrier(num_arrivals=2 * parts + 2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ),
        grid=(heads, length // OWN, batch),
        grid_names=("heads", "blocks", "batch"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=lowering.gpu_interpret(),
    )
    return kernel(ranges.reshape(-1), window.reshape(1), *tensors, columns, segments)


def _queries_kernel(
    ranges: Any,
    window: Any,
    queries: Any,
    d_out: Any,
    rows: Any,
    keys: Any,
    values: Any,
    columns: Any,
    segments: Any,
    d_queries: Any,
    own: tuple[Any, ...],
    other: tuple[Any, ...],
    own_here: Any,
    here: Any,
    free: Any,
    *,
    scale: float,
) -> None:
    """d q_i = sum_j dz_ij k_j / sqrt(D) with dz = p (d_out v - d_out out)."""
    batch, head = lax.axis_index("batch"), lax.axis_index("heads")
    me = lax.axis_index("warpgroup")
    blocks = d_queries.shape[2] // OWN
    block = blocks - 1 - lax.axis_index("blocks")  # the longest first
    at = (batch * blocks + block) * 4
    first, last = ranges[at], ranges[at + 3]
    size = d_queries.shape[3]
    keys_smem, values_smem, columns_smem, segments_smem = other
    tokens = keys_smem.shape[2]

    @pl.when(me < 2)
    def compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        start = block * OWN + me * ROWS
        mine = pl.ds(start, ROWS)
        q_smem, d_queries_smem = (array.at[me] for array in own[0])
        d_out_smem, rows_smem, asking_smem = (array.at[me] for array in own[1:])
        arrived = own_here.at[me]
        fetch(queries, (batch, head, mine), q_smem, arrived)
        fetch(d_out, (batch, head, mine), d_out_smem, arrived)
        plgpu.copy_gmem_to_smem(rows.at[batch, head, :, mine], rows_smem, arrived)
        plgpu.copy_gmem_to_smem(segments.at[batch, mine], asking_smem, arrived)
        plgpu.barrier_wait(arrived)
        full_first, full_last = ranges[at + 1], ranges[at + 2]
        seen_window = window[0]
        lse = plgpu.load(rows_smem.at[0], layout=BY_ROW)
        offset = plgpu.load(rows_smem.at[1], layout=BY_ROW)

        def visit(index: Array, total: Array) -> Array:
            slot = lax.rem(index - first, jnp.int32(STAGES))
            plgpu.barrier_wait(here.at[slot])
            k = keys_smem.at[slot]
            found = logits(
                product(q_smem, transposed(k)),
                scale=scale * LOG2E,
                full=(index >= full_first) & (index < full_last),
                offset=start - index * tokens,
                window=seen_window,
                asking=asking_smem,
                held=segments_smem.at[slot],
                columns=columns_smem.at[slot],
            )
            weights = jnp.exp2(found - along_rows(lse, found.shape))
            d_weights = product(d_out_smem, transposed(values_smem.at[slot]))
            d_logits = weights * (d_weights + along_rows(offset, found.shape))
            (total,) = accumulate((total, split(d_logits, d_queries.dtype), k))
            plgpu.barrier_arrive(free.at[slot])
            return total

        total = lax.fori_loop(first, last, visit, filled((ROWS, size), 0.0))
        d_queries_smem[...] = (total * scale).astype(d_queries.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(d_queries_smem, d_queries.at[batch, head, mine])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(me == 2)
    def copy() -> None:
        plgpu.set_max_registers(40, action="decrease")
        held = lax.div(head, jnp.int32(queries.shape[2] // keys.shape[2]))

        @pl.loop(first, last)
        def ahead(index: Array) -> None:
            slot = lax.rem(index - first, jnp.int32(STAGES))
            some = pl.ds(index * tokens, tokens)
            pl.when(index - first >= STAGES)(lambda: plgpu.barrier_wait(free.at[slot]))
            fetch(keys, (batch, held, some), keys_smem.at[slot], here.at[slot])
            fetch(values, (batch, held, some), values_smem.at[slot], here.at[slot])
            for source, target in (
                (columns.at[batch, held, :, some], columns_smem),
                (segments.at[batch, some], segments_smem),
            ):
                plgpu.copy_gmem_to_smem(source, target.at[slot], here.at[slot])

        drain(last - first, STAGES, free)
