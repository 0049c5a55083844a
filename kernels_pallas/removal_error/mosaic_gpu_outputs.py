"""Attention outputs on Hopper from given weights: sum_j a_h[j] v_j, in float32.

XLA would write the values in float32, or each head's products with them. A program adds up part of
the slots for some channels of all G heads of a query group, each in a tile of registers whose rows
are slots; the parts are joined outside. A few float32 operations per number read: the memory is
the limit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas import lowering
from kernels_pallas.warpgroup import BY_COLUMN, BY_ROW, TILE, along_rows, filled, swizzled

BLOCK = 256  # slots that are copied at once
_ROWS = 64  # slots of a tile
_PROGRAMS = 4 * 132  # a few for each processor of an H100 or H200


def attention_outputs(
    weights: Float[Array, "BK G P"],
    values: Float[Array, "BK S D"],
    positions: Int[Array, "BK P"],
    summed_before: Int[Array, " B"],
) -> Float[Array, "BK G D"]:
    """Sums over the slots at positions below `summed_before`, P of them a multiple of BLOCK."""
    heads, groups, padded = weights.shape
    size = values.shape[2]
    channels = 32 if groups <= 4 and size % 32 == 0 else 16
    blocks = padded // BLOCK
    parts = min(blocks, max(1, _PROGRAMS // (heads * size // channels)))
    kv_heads = heads // summed_before.shape[0]
    wide = (_ROWS, channels)

    def kernel(
        weight_gmem: Any,
        value_gmem: Any,
        position_gmem: Any,
        before_gmem: Any,
        out_gmem: Any,
        out_smem: Any,
    ) -> None:
        head, part = lax.axis_index("head"), lax.axis_index("part")
        piece = lax.axis_index("piece")
        before = before_gmem[lax.div(head, jnp.int32(kv_heads))]
        start = lax.div(part * blocks, jnp.int32(parts))
        end = lax.div((part + 1) * blocks, jnp.int32(parts))

        def step(
            indices: Any, weight_smem: Any, value_smem: Any, position_smem: Any, sums: Any
        ) -> tuple[Array, ...]:
            del indices

            def add(tile: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
                own = pl.ds(tile * _ROWS, _ROWS)
                position = along_rows(plgpu.load(position_smem.at[own], layout=BY_ROW), wide)
                value = plgpu.load(value_smem.at[own], layout=TILE).astype(jnp.float32)
                # The values of empty slots may be NaN.
                value = jnp.where((position >= 0) & (position < before), value, 0.0)
                return tuple(
                    total
                    + along_rows(plgpu.load(weight_smem.at[g, own], layout=BY_ROW), wide) * value
                    for g, total in enumerate(sums)
                )

            return lax.fori_loop(0, BLOCK // _ROWS, add, sums)

        sums = plgpu.emit_pipeline(
            step,
            grid=(end - start,),
            in_specs=[
                plgpu.BlockSpec((groups, BLOCK), lambda i: (0, start + i)),
                plgpu.BlockSpec(
                    (BLOCK, channels),
                    lambda i: (start + i, piece),
                    transforms=swizzled(channels, values.dtype),
                ),
                plgpu.BlockSpec((BLOCK,), lambda i: (start + i,)),
            ],
            max_concurrent_steps=3,
            init_carry=tuple(filled(wide, 0.0) for _ in range(groups)),
        )(weight_gmem.at[head], value_gmem.at[head], position_gmem.at[head])
        for g, total in enumerate(sums):
            out_smem.at[g][...] = plgpu.layout_cast(jnp.sum(total, axis=0), BY_COLUMN)
        plgpu.commit_smem()
        to = pl.ds(piece * channels, channels)
        plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[head, part, :, to])
        plgpu.wait_smem_to_gmem(0)

    found = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((heads, parts, groups, size), jnp.float32),
        scratch_types=[plgpu.SMEM((groups, channels), jnp.float32)],
        grid=(size // channels, parts, heads),
        grid_names=("piece", "part", "head"),
        interpret=lowering.gpu_interpret(),
        kernel_name="attention_outputs",
    )(weights, values, positions, summed_before)
    return jnp.sum(found, axis=1)
