"""Removal errors on Hopper: two warpgroups hold 128 slots each while a third streams the factor by.

A first kernel sums the outputs o_h. Then a program takes 256 slots of a KV head: their values stay
in shared memory, and the factor passes in tiles of D x D, jointly those on and below the diagonal,
column by column. A warpgroup makes a_h / (1 - a_h) (o_h - v) in its registers, a few channels at a
time while the tensor cores work on the last, as their left operand: slots lie in the rows, so that
a column's squares are summed within a warp, and nothing of S x G D is written. Values are
subtracted before they are projected. Rows do not mix: a NaN stays in the row of its empty slot,
whose weights are 0, and so is its error.

Operands in float32 are cut into two bfloat16, and three of the four products are taken: about 2^-16
of |change| |F|, where one tf32 product would be off by 2^-11. FLOPs on the tensor cores, per slot
and KV head: 3 G D (G D + D) jointly, 6 G D^2 apart; beside them some eight operations in float32
per channel and tile. Per slot and KV head two times D x item size of values are read, 8 G + 4 of
weights and positions, and 4 written (4 G apart): the tensor cores are the limit, not the memory.
The factor comes from L2 once per 256 slots, 4 bytes an entry: 384 FLOPs per byte. Values are copied
beforehand where their slots are no multiple of 8: the hardware's tiled copies ask for that.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas import lowering
from kernels_pallas.attention.blocks import pad_to
from kernels_pallas.halves import halves
from kernels_pallas.partition import partitioned
from kernels_pallas.removal_error.blockwise import odds
from kernels_pallas.removal_error.mosaic_gpu_outputs import BLOCK, attention_outputs
from kernels_pallas.removal_error.mosaic_gpu_products import add_products
from kernels_pallas.warpgroup import (
    BY_COLUMN,
    BY_ROW,
    TILE,
    along_columns,
    along_rows,
    drain,
    filled,
    swizzled,
)

_WARPGROUPS = 2  # that compute
_ROWS = BLOCK // _WARPGROUPS  # slots of each
_MOST_GROUPS = 16  # whose sums for the outputs stay in registers
_SHARED_BYTES = 224 * 1024  # of the 227 KiB


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
) -> Float[Array, "B N S"]:
    """As the reference."""
    lowering.decline_wrong_masks()
    batch, kv_heads, groups, slots = weights.shape
    size = values.shape[3]
    if factor is None:
        raise NotImplementedError("no factor: allowed is one, without it nothing is multiplied")
    if values.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"values of {values.dtype}: allowed are bfloat16 and float32")
    if size % 16 or size > 128:
        raise NotImplementedError(f"head size {size}: allowed are multiples of 16 up to 128")
    if groups > _MOST_GROUPS:
        raise NotImplementedError(
            f"{groups} query heads per KV head: allowed are up to {_MOST_GROUPS}"
        )
    plan = _Plan(kv_heads=kv_heads, groups=groups, size=size, joint=joint, tau=tau)
    heads = batch * kv_heads
    weights = pad_to(weights.reshape(heads, groups, slots), BLOCK, 2)
    # Tiled copies take whole tiles of 8 rows of an array, and read zeros behind its end.
    values = pad_to(values.reshape(heads, slots, size), 8, 1)
    positions = pad_to(positions.reshape(heads, slots), BLOCK, 1, fill=-1)
    outputs = attention_outputs(weights, values, positions, summed_before)
    tiles = halves(_tiles(factor, kv_heads, groups, size, joint=joint))
    found = _errors(plan, weights, values, outputs, *tiles)
    return found[..., :slots].reshape(batch, -1, slots)


def _tiles(
    factor: Float[Array, "N M R"], kv_heads: int, groups: int, size: int, *, joint: bool
) -> Float[Array, "K T D D"]:
    """The factor's tiles in the order in which they are multiplied."""
    factor = factor.astype(jnp.float32)
    parts = groups if joint else 1
    padded = jnp.pad(factor, ((0, 0), (0, 0), (0, parts * size - factor.shape[2])))
    if not joint:
        return padded.reshape(kv_heads, groups, size, size)
    # Lower triangular: column c of tiles has rows from c on only.
    blocks = padded.reshape(kv_heads, groups, size, groups, size)
    lower = [blocks[:, h, :, c] for c in range(groups) for h in range(c, groups)]
    return jnp.stack(lower, axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is computed, and in which pieces."""

    kv_heads: int
    groups: int
    size: int
    joint: bool
    tau: float

    @property
    def tiles(self) -> int:
        return self.groups * (self.groups + 1) // 2 if self.joint else self.groups

    @property
    def depth(self) -> int:
        """Rows of a tile that are copied at once."""
        return 64 if self.size % 64 == 0 else self.size

    @property
    def chunk(self) -> int:
        """Channels of the left operand that are in registers at once."""
        return 32 if self.size % 32 == 0 else 16

    @property
    def rows(self) -> int:
        """Results per slot and KV head."""
        return 1 if self.joint else self.groups

    def stages(self, item: int) -> int:
        """Pieces of `depth` rows, two halves, that fit next to all the rest."""
        numbers = self.groups * (BLOCK + self.size) + self.rows * BLOCK
        left = _SHARED_BYTES - BLOCK * self.size * item - 4 * numbers
        return min(4, left // (4 * self.depth * self.size))


def _errors(
    plan: _Plan,
    weights: Float[Array, "BK G P"],
    values: Float[Array, "BK S D"],
    outputs: Float[Array, "BK G D"],
    high: Float[Array, "K T D D"],
    low: Float[Array, "K T D D"],
) -> Float[Array, "BK N P"]:
    heads, groups, padded = weights.shape
    size, depth, chunk = plan.size, plan.depth, plan.chunk
    stages = plan.stages(values.dtype.itemsize)
    pieces = size // depth  # of a tile
    rows = plan.rows
    stage = plgpu.SMEM(
        (stages, depth, size), jnp.bfloat16, transforms=swizzled(chunk, jnp.bfloat16)
    )

    def kernel(
        weight_gmem: Any,
        value_gmem: Any,
        output_gmem: Any,
        high_gmem: Any,
        low_gmem: Any,
        out_gmem: Any,
        weight_smem: Any,
        value_smem: Any,
        output_smem: Any,
        high_smem: Any,
        low_smem: Any,
        out_smem: Any,
        here: Any,
        arrived: Any,
        free: Any,
    ) -> None:
        head, block = lax.axis_index("head"), lax.axis_index("block")
        me = lax.axis_index("warpgroup")
        steps = jnp.int32(plan.tiles * pieces)

        @pl.when(me == _WARPGROUPS)
        def copy() -> None:
            plgpu.set_max_registers(40, action="decrease")
            own = pl.ds(block * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(weight_gmem.at[head, :, own], weight_smem, here)
            plgpu.copy_gmem_to_smem(value_gmem.at[head, own], value_smem, here)
            plgpu.copy_gmem_to_smem(output_gmem.at[head], output_smem, here)
            kv_head = lax.rem(head, jnp.int32(plan.kv_heads))

            @pl.loop(0, steps)
            def ahead(step: Array) -> None:
                slot = lax.rem(step, jnp.int32(stages))
                tile, piece = lax.div(step, jnp.int32(pieces)), lax.rem(step, jnp.int32(pieces))
                some = pl.ds(piece * depth, depth)

                @pl.when(step >= stages)
                def wait() -> None:
                    plgpu.barrier_wait(free.at[slot])

                for source, into in ((high_gmem, high_smem), (low_gmem, low_smem)):
                    plgpu.copy_gmem_to_smem(
                        source.at[kv_head, tile, some], into.at[slot], arrived.at[slot]
                    )

            drain(steps, stages, free)

        @pl.when(me < _WARPGROUPS)
        def compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(me * _ROWS, _ROWS)
            wide = (_ROWS, chunk)
            plgpu.barrier_wait(here)

            def share(group: Array) -> Array:
                return odds(plgpu.load(weight_smem.at[group, mine], layout=BY_ROW))

            def change(group: Array, own: Array | None, at: Array) -> Array:
                channels = pl.ds(at, chunk)
                value = plgpu.load(value_smem.at[mine, channels], layout=TILE)
                output = plgpu.load(output_smem.at[group, channels], layout=BY_COLUMN)
                difference = along_columns(output, wide) - value.astype(jnp.float32)
                return difference if own is None else along_rows(own, wide) * difference

            def multiplied(group: Array, tile: Array, total: Array) -> Array:
                """Adds a head's change times a tile of the factor."""
                own = share(group) if plan.joint else None

                def add(piece: Array, total: Array) -> Array:
                    slot = lax.rem(tile * pieces + piece, jnp.int32(stages))
                    plgpu.barrier_wait(arrived.at[slot])
                    parts = (
                        (
                            change(group, own, piece * depth + at),
                            *(ref.at[slot, pl.ds(at, chunk)] for ref in (high_smem, low_smem)),
                        )
                        for at in range(0, depth, chunk)
                    )
                    total = add_products(total, parts)
                    plgpu.barrier_arrive(free.at[slot])
                    return total

                return lax.fori_loop(0, pieces, add, total)

            def squares(product: Array) -> Array:
                return jnp.sum(product * product, axis=1)

            def joint_norm() -> tuple[Array, Array]:
                def column(at: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                    total, tile = carry
                    product = lax.fori_loop(
                        at,
                        groups,
                        lambda group, sums: multiplied(group, tile + group - at, sums),
                        filled((_ROWS, size), 0.0),
                    )
                    return total + squares(product), tile + groups - at

                none = filled((_ROWS,), 0.0, BY_ROW)
                total, _ = lax.fori_loop(0, groups, column, (none, jnp.int32(0)))
                scale = lax.fori_loop(0, groups, lambda group, sums: sums + share(group), none)
                return total, scale

            if plan.joint:
                total, scale = joint_norm()
                out_smem.at[me, 0][...] = _raised(total, scale, plan.tau, joint=True)
            else:

                @pl.loop(0, groups)
                def apart(group: Array) -> None:
                    product = multiplied(group, group, filled((_ROWS, size), 0.0))
                    error = _raised(squares(product), share(group), plan.tau, joint=False)
                    out_smem.at[me, group][...] = error

            plgpu.commit_smem()
            to = pl.ds(block * BLOCK + me * _ROWS, _ROWS)
            plgpu.copy_smem_to_gmem(out_smem.at[me], out_gmem.at[head, :, to])
            plgpu.wait_smem_to_gmem(0)

    found: Array = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((heads, rows, padded), jnp.float32),
        scratch_types=[
            plgpu.SMEM((groups, BLOCK), jnp.float32),
            plgpu.SMEM((BLOCK, size), values.dtype, transforms=swizzled(chunk, values.dtype)),
            plgpu.SMEM((groups, size), jnp.float32),
            stage,
            stage,
            plgpu.SMEM((_WARPGROUPS, rows, _ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages),
        ],
        grid=(padded // BLOCK, heads),
        grid_names=("block", "head"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=lowering.gpu_interpret(),
        kernel_name="removal_error",
    )(weights, values, outputs, high, low)
    return found


def _raised(total: Array, share: Array, tau: float, *, joint: bool) -> Array:
    """The error of a sum of squares; 0 where there is no weight, whatever the values were."""
    weighs = share > 0
    safe = jnp.where(weighs, share, 1.0)
    norm = jnp.sqrt(jnp.where(weighs, total, 0.0))
    if tau != 1:
        norm = jnp.exp(tau * jnp.log(norm / safe if joint else norm))
    elif joint:
        return norm
    return jnp.where(weighs, safe * norm, 0.0)
