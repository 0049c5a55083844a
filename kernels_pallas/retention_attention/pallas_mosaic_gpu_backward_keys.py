"""The gradients of keys, values and decays of attention under retention decay on Hopper GPUs.

A block of threads has 128 keys of a KV head and goes over the queries of all heads of the group.
Its tiles are transposed, keys by queries, so that weights and their gradients come out of one
product as the next one takes them; 8 D FLOPs per visible pair and query head.
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

from kernels_pallas import halves, lowering
from kernels_pallas.retention_attention import tiles
from kernels_pallas.retention_attention.pallas_mosaic_gpu import LOG2E, ROWS
from kernels_pallas.retention_attention.wgmma import (
    accumulate,
    fetch,
    product,
    shared,
    split,
    transposed,
)
from kernels_pallas.warpgroup import (
    BY_COLUMN,
    BY_ROW,
    along_columns,
    along_rows,
    drain,
    filled,
    iota,
)

OWN = 2 * ROWS  # rows of a block of threads: queries of the one kernel, keys of this one
STAGES = 2


def tokens_of_step(queries: Array) -> int:
    """Of the other side at a time, whose two tensors come in two stages, for these queries."""
    return 64 if halves.count(queries.dtype) * queries.shape[3] <= 128 else 32


def keys_gradients(
    scale: float,
    tensors: tuple[Array, ...],
    log_beta: Float[Array, "B K T"],
    segments: Int[Array, "B T"],
    window: Int[Array, ""],
    *,
    step: int,
    dtype: Any,
) -> tuple[Array, Array, Array]:
    """Of keys, values and log_beta, from queries, d_out, rows, keys and values in parts.

    `step` is the number of queries at a time, and `dtype` the type of the gradients.
    """
    operand = tensors[3].dtype
    parts, batch, kv_heads, length, size = tensors[3].shape
    ranges = tiles.query_ranges(segments, step, OWN, window)
    gradient = jax.ShapeDtypeStruct((batch, kv_heads, length, size), dtype)
    # The gradients leave from where keys and values came in.
    own = plgpu.RefUnion(
        shared((2, parts, ROWS, size), operand, step), shared((2, ROWS, size), dtype)
    )
    other = shared((STAGES, parts, step, size), operand, step)
    kernel = plgpu.kernel(
        functools.partial(_keys_kernel, scale=scale),
        out_type=(
            gradient,
            gradient,
            jax.ShapeDtypeStruct(log_beta.shape, jnp.float32),
        ),
        scratch_types=(
            (own, own, plgpu.SMEM((2, ROWS), jnp.float32), plgpu.SMEM((2, ROWS), jnp.int32)),
            (
                other,
                other,
                plgpu.SMEM((STAGES, 3, step), jnp.float32),
                plgpu.SMEM((STAGES, step), jnp.int32),
            ),
            plgpu.Barrier(num_arrivals=2 * parts + 2, num_barriers=2),
            plgpu.Barrier(num_arrivals=2 * parts + 2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ),
        grid=(kv_heads, length // OWN, batch),
        grid_names=("heads", "blocks", "batch"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=lowering.gpu_interpret(),
    )
    return kernel(ranges.reshape(-1), window.reshape(1), *tensors, log_beta * LOG2E, segments)


def _keys_kernel(
    ranges: Any,
    window: Any,
    queries: Any,
    d_out: Any,
    rows: Any,
    keys: Any,
    values: Any,
    decays: Any,
    segments: Any,
    d_keys: Any,
    d_values: Any,
    d_log_beta: Any,
    own: tuple[Any, ...],
    other: tuple[Any, ...],
    own_here: Any,
    here: Any,
    free: Any,
    *,
    scale: float,
) -> None:
    """d v_j = sum_i p_ij d_out_i, d k_j = sum_i dz_ij q_i / sqrt(D), and

    d log_beta_j = sum_i dz_ij (i - j), all of them over the group's heads too.
    """
    batch, head = lax.axis_index("batch"), lax.axis_index("heads")
    me, block = lax.axis_index("warpgroup"), lax.axis_index("blocks")
    at = (batch * (d_keys.shape[2] // OWN) + block) * 4
    first, last = ranges[at], ranges[at + 3]
    count = last - first
    group, size = queries.shape[2] // keys.shape[2], d_keys.shape[3]
    q_smem, d_out_smem, rows_smem, segments_smem = other
    tokens = q_smem.shape[2]
    shape = (ROWS, tokens)

    @pl.when(me < 2)
    def compute() -> None:
        # A launch has 3 x 168 registers to share out; asking for more would wait for ever.
        plgpu.set_max_registers(240, action="increase")
        start = block * OWN + me * ROWS
        mine = pl.ds(start, ROWS)

        def owned() -> list[Any]:
            # The warpgroup's number is asked for anew where it is used: the descriptors of these
            # tiles would be kept over the loop otherwise, in registers that sums and weights need.
            me = lax.axis_index("warpgroup")
            (k, d_k), (v, d_v), decays, held = own
            return [array.at[me] for array in (k, v, decays, held, d_k, d_v)]

        k_smem, v_smem, decays_smem, held_smem, d_keys_smem, d_values_smem = owned()
        arrived = own_here.at[me]
        fetch(keys, (batch, head, mine), k_smem, arrived)
        fetch(values, (batch, head, mine), v_smem, arrived)
        plgpu.copy_gmem_to_smem(decays.at[batch, head, mine], decays_smem, arrived)
        plgpu.copy_gmem_to_smem(segments.at[batch, mine], held_smem, arrived)
        plgpu.barrier_wait(arrived)

        def visit(step: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            sum_keys, sum_values, sum_decays = carry
            slot = lax.rem(step, jnp.int32(STAGES))
            index = first + lax.div(step, jnp.int32(group))
            plgpu.barrier_wait(here.at[slot])
            q, d_o = q_smem.at[slot], d_out_smem.at[slot]
            k_smem, v_smem, decays_smem, held_smem = owned()[:4]
            offset = index * tokens - start

            def of_queries(which: int) -> Array:
                memory = rows_smem.at[slot, which]
                return along_columns(plgpu.load(memory, layout=BY_COLUMN), shape)

            def age() -> Array:
                # Read anew where it is used: there are no registers to keep it in.
                return of_queries(2) + (offset - iota(shape, 0)).astype(jnp.float32)

            found = product(k_smem, transposed(q)) * (scale * LOG2E)
            decay = along_rows(plgpu.load(decays_smem, layout=BY_ROW), shape)
            found = found + age() * decay

            def masked(found: Array) -> Array:
                ages = age()
                held = along_rows(plgpu.load(held_smem, layout=BY_ROW), shape)
                asking = plgpu.load(segments_smem.at[slot], layout=BY_COLUMN)
                same = (along_columns(asking, shape) == held) & (held >= 0)
                seen = same & (ages >= 0) & (ages < window[0].astype(jnp.float32))
                return jnp.where(seen, found, -jnp.inf)

            full = (index >= ranges[at + 1]) & (index < ranges[at + 2])
            found = lax.cond(full, lambda found: found, masked, found)
            weights = jnp.exp2(found - of_queries(0))
            # The product starts at what would be subtracted from it.
            sum_values, d_weights = accumulate(
                (sum_values, split(weights, d_keys.dtype), d_o),
                (of_queries(1), v_smem, transposed(d_o)),
            )
            d_logits = weights * d_weights
            sum_decays = sum_decays + (d_logits * age()).sum(axis=1)
            (sum_keys,) = accumulate((sum_keys, split(d_logits, d_keys.dtype), q))
            plgpu.barrier_arrive(free.at[slot])
            return sum_keys, sum_values, sum_decays

        sum_keys, sum_values, sum_decays = lax.fori_loop(
            0,
            count * group,
            visit,
            (filled((ROWS, size), 0.0), filled((ROWS, size), 0.0), filled((ROWS,), 0.0, BY_ROW)),
        )
        d_keys_smem[...] = (sum_keys * scale).astype(d_keys.dtype)
        d_values_smem[...] = sum_values.astype(d_values.dtype)
        decays_smem[...] = sum_decays
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(d_keys_smem, d_keys.at[batch, head, mine])
        plgpu.copy_smem_to_gmem(d_values_smem, d_values.at[batch, head, mine])
        plgpu.copy_smem_to_gmem(decays_smem, d_log_beta.at[batch, head, mine])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(me == 2)
    def copy() -> None:
        plgpu.set_max_registers(24, action="decrease")

        @pl.loop(0, count * group)
        def ahead(step: Array) -> None:
            slot = lax.rem(step, jnp.int32(STAGES))
            asking = head * group + lax.rem(step, jnp.int32(group))
            some = pl.ds((first + lax.div(step, jnp.int32(group))) * tokens, tokens)
            pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(free.at[slot]))
            fetch(queries, (batch, asking, some), q_smem.at[slot], here.at[slot])
            fetch(d_out, (batch, asking, some), d_out_smem.at[slot], here.at[slot])
            for source, target in (
                (rows.at[batch, asking, :, some], rows_smem),
                (segments.at[batch, some], segments_smem),
            ):
                plgpu.copy_gmem_to_smem(source, target.at[slot], here.at[slot])

        drain(count * group, STAGES, free)
