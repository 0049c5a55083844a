"""Removal errors on TPU: the values are read once while a head's fit in VMEM.

The grid goes over a KV head's blocks of values twice: for the outputs, then for the norms. Blocks
are turned to [D, slots] on the way in, by the matrix unit, so that everything per slot is a row
of lanes; the first sweep leaves them so in VMEM, as many as `_KEPT_BYTES` hold, and the second
fetches only the rest.

Per slot and KV head, with D x item size = d, that reads d bytes of values (2 d of those that do
not fit), 8 G of weights, 8 of positions, and writes 4 (4 G apart). FLOPs: G D (G D + D) jointly,
2 G D^2 apart, 2 D^2 for turning and 2 G D for the outputs, in float32 by six bfloat16 passes, as
the reference asks: the matrix unit is the limit, not the memory. Values are subtracted before
they are projected.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas.lowering import tpu_interpret
from kernels_pallas.partition import partitioned

_LANES = 128
_BLOCK = 512
_KEPT_BYTES = 32 * 2**20  # of the 128 MiB of VMEM on v5e and v6e
_FACTOR_BYTES = 16 * 2**20  # held twice


@partitioned("B K G S, B K S D, B K S, B, N M R -> B N S")
def removal_error(
    weights: Float[Array, "B K G S"],
    values: Float[Array, "B K S D"],
    positions: Int[Array, "B K S"],
    summed_before: Int[Array, " B"],
    factor: Float[Array, "N M R"] | None,
    *,
    joint: bool,
    tau: float = 1.0,
    kept_bytes: int = _KEPT_BYTES,
    block: int = _BLOCK,
) -> Float[Array, "B N S"]:
    """As the reference. `kept_bytes` of values stay in VMEM; `block` is a multiple of 128."""
    batch, kv_heads, groups, slots = weights.shape
    size = values.shape[3]
    if values.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"values of {values.dtype}: allowed are bfloat16 and float32")
    if size % 8:
        raise NotImplementedError(f"head size {size}: allowed are multiples of 8")
    transposed = _transposed(factor, kv_heads, groups, size, joint=joint)
    if transposed is not None and transposed[0].size * 4 > _FACTOR_BYTES:
        raise NotImplementedError(
            f"a factor of {transposed[0].size * 4} bytes per KV head: allowed are {_FACTOR_BYTES}"
        )
    if slots <= block:
        block = slots
    blocks = pl.cdiv(slots, block)
    block_bytes = size * -(-block // _LANES) * _LANES * values.dtype.itemsize
    kept = min(kept_bytes // block_bytes, blocks)
    outputs = 1 if joint else groups

    def kernel(
        before_ref: Any, weight_ref: Any, value_ref: Any, position_ref: Any, *refs: Any
    ) -> None:
        factor_ref, refs = (None, refs) if factor is None else (refs[0], refs[1:])
        out_ref, output_ref, *kept_ref = refs
        sweep, step = pl.program_id(1), pl.program_id(2)
        held = position_ref[0]
        valid = held >= 0
        if slots % block:  # behind the last slot the block holds anything
            valid &= lax.broadcasted_iota(jnp.int32, held.shape, 1) + step * block < slots

        def turned() -> Array:
            rows = lax.broadcasted_iota(jnp.int32, (size, size), 0)
            columns = lax.broadcasted_iota(jnp.int32, (size, size), 1)
            identity = jnp.where(rows == columns, 1.0, 0.0).astype(values.dtype)
            return _product(identity, value_ref[0], 1, 1)

        def clean(block_of_values: Array) -> Array:
            return jnp.where(valid, block_of_values, 0.0)

        @pl.when((sweep == 0) & (step == 0))
        def _start() -> None:
            output_ref[...] = jnp.zeros_like(output_ref)

        @pl.when(sweep == 0)
        def _sum() -> None:
            block_of_values = clean(turned())
            if kept:

                @pl.when(step < kept)
                def _keep() -> None:
                    kept_ref[0][step] = block_of_values.astype(values.dtype)

            summed = valid & (held < before_ref[pl.program_id(0) // kv_heads])
            own = jnp.where(summed, weight_ref[0], 0.0)
            output_ref[...] += _product(block_of_values, own, 1, 1)

        def write(block_of_values: Array) -> None:
            share = weight_ref[0]
            share = share / jnp.maximum(1.0 - share, 1e-6)
            change = [output_ref[:, g : g + 1] - block_of_values for g in range(groups)]
            if joint:
                stacked = jnp.concatenate(
                    [share[g : g + 1] * change[g] for g in range(groups)], axis=0
                )
                norm = _joint_norm(stacked, factor_ref, size)
                if tau != 1:
                    scale = jnp.sum(share, axis=0, keepdims=True)
                    safe = jnp.where(scale > 0, scale, 1.0)
                    norm = scale * jnp.exp(tau * jnp.log(norm / safe))
                out_ref[0] = norm
                return
            for g in range(groups):
                own = change[g]
                if factor_ref is not None:
                    own = _product(factor_ref[0, g], own, 1, 0)
                norm = jnp.sqrt(jnp.sum(own * own, axis=0, keepdims=True))
                norm = norm if tau == 1 else jnp.exp(tau * jnp.log(norm))
                out_ref[0, g : g + 1] = share[g : g + 1] * norm

        if kept:

            @pl.when((sweep == 1) & (step < kept))
            def _from_vmem() -> None:
                write(kept_ref[0][jnp.minimum(step, kept - 1)].astype(jnp.float32))

        if kept < blocks:

            @pl.when((sweep == 1) & (step >= kept))
            def _from_hbm() -> None:
                write(clean(turned()))

    def fetched(head: Array, sweep: Array, step: Array, before: Any) -> tuple[Any, ...]:
        # The second sweep rests on the first block that it will need.
        del before
        resting = jnp.maximum(step, min(kept, blocks - 1))
        return head, jnp.where(sweep == 0, step, resting), 0

    factors = [] if transposed is None else [transposed]
    out: Array = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((batch * kv_heads, outputs, slots), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch * kv_heads, 2, blocks),
            in_specs=[
                pl.BlockSpec((1, groups, block), lambda head, sweep, step, _: (head, 0, step)),
                pl.BlockSpec((1, block, size), fetched),
                pl.BlockSpec((1, 1, block), lambda head, sweep, step, _: (head, 0, step)),
                *[
                    pl.BlockSpec(
                        (1, *array.shape[1:]),
                        lambda head, sweep, step, _: (head % kv_heads, 0, 0, 0),
                    )
                    for array in factors
                ],
            ],
            # Nothing is written in the first sweep.
            out_specs=pl.BlockSpec(
                (1, outputs, block), lambda head, sweep, step, _: (head, 0, step * sweep)
            ),
            scratch_shapes=[
                pltpu.VMEM((size, groups), jnp.float32),
                *([pltpu.VMEM((kept, size, block), values.dtype)] if kept else []),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=96 * 2**20,
        ),
        interpret=tpu_interpret(),
        name="removal_error",
    )(
        summed_before,
        weights.reshape(batch * kv_heads, groups, slots),
        values.reshape(batch * kv_heads, slots, size),
        positions.reshape(batch * kv_heads, 1, slots),
        *factors,
    )
    return out.reshape(batch, -1, slots)


def _transposed(
    factor: Array | None, kv_heads: int, groups: int, size: int, *, joint: bool
) -> Float[Array, "K C D M"] | None:
    """Per KV head, and per D columns (`joint`) or query head, the factor's columns as rows."""
    if factor is None:
        return None
    parts = groups if joint else 1
    missing = parts * size - factor.shape[2]
    rows = jnp.swapaxes(jnp.pad(factor, ((0, 0), (0, 0), (0, missing))), 1, 2)
    rows = rows.astype(jnp.float32)
    return rows.reshape(kv_heads, groups, size, parts * size)


def _joint_norm(stacked: Float[Array, "GD N"], factor_ref: Any, size: int) -> Float[Array, "1 N"]:
    if factor_ref is None:
        return jnp.sqrt(jnp.sum(stacked * stacked, axis=0, keepdims=True))
    total = jnp.zeros((1, stacked.shape[1]), jnp.float32)
    # The factor is lower triangular: its columns from c D on read rows from c D on only.
    for part in range(stacked.shape[0] // size):
        rows = factor_ref[0, part]
        projected = _product(rows[:, part * size :], stacked[part * size :], 1, 0)
        total = total + jnp.sum(projected * projected, axis=0, keepdims=True)
    return jnp.sqrt(total)


def _product(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    """In float32: the default would round float32 operands to bfloat16."""
    exact = left.dtype == jnp.bfloat16 and right.dtype == jnp.bfloat16
    return lax.dot_general(
        left,
        right,
        (((left_axis,), (right_axis,)), ((), ())),
        precision=None if exact else lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
