"""Selection on GPU with a row in shared memory: what is read is read once.

Grid: one block of threads per row. It reads scores, rank and validity, keeps the order key of
every slot (4 bytes) in shared memory, and finds the threshold there, bit by bit, in at most 32
counting passes; it stops where a candidate has exactly the budget at or above it. Where only
some of the keys equal to the threshold stay, further passes find, bit by bit too, the slot before
which those lie.

Bytes per slot: 9 read, 1 written, and 2 more each way where a mask of bytes becomes one of
booleans: 14, 1.4 times the 10 that are needed.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import lowering
from kernels_pallas.partition import partitioned
from kernels_pallas.select.axes import axes

_LEAST = -(2**31)  # of int32: the key of an empty slot
_PART = 128  # slots that a warpgroup reads at once, one per thread
_WIDE = 512  # slots that it counts at once
_SHORT = 2048  # slots of rows that one warpgroup takes alone
_GROUPS = 4  # warpgroups of a longer row
_LONGEST = 49152  # slots whose keys fit in shared memory


@partitioned(axes)
def keep_mask(
    scores: Float[Array, "*n S"],
    rank: Int[Array, "*n S"],
    valid: Bool[Array, "*n S"],
    budgets: Int[Array, "*n"],
) -> Bool[Array, "*n S"]:
    """As the reference."""
    slots, rows = scores.shape[-1], math.prod(budgets.shape)
    if not _PART <= slots <= _LONGEST:
        raise NotImplementedError(
            f"rows of {slots} slots: allowed are {_PART}, one per thread, to {_LONGEST}, "
            "whose keys fit in shared memory"
        )
    groups = 1 if slots <= _SHORT else _GROUPS
    padded = -(-slots // (_WIDE * groups)) * _WIDE * groups
    last = slots - _PART  # where the last part begins: it may overlap the one before

    def body(
        scores: Any, rank: Any, valid: Any, budgets: Any, out: Any, keys: Any, counts: Any,
        barrier: Any,
    ) -> None:  # fmt: skip
        row, group = lax.axis_index("row"), lax.axis_index("group")
        budget, least = budgets[row], jnp.int32(_LEAST)

        def meet() -> None:
            if groups > 1:
                plgpu.barrier_arrive(barrier)
                plgpu.barrier_wait(barrier)

        def read(step: Any, _: None) -> None:
            place = (step * groups + group) * _PART
            start = jnp.minimum(place, last)
            part = pl.ds(start, _PART)
            key = _order_key(scores[row, part], rank[row, part], valid[row, part])
            slot = lax.broadcasted_iota(jnp.int32, (_PART,), 0) + start
            keys[pl.ds(place, _PART)] = jnp.where(slot < place, least, key)

        lax.fori_loop(0, padded // _PART // groups, read, None)
        meet()

        def count(holds: Any, turn: Any) -> Any:
            """Slots of the row of which `holds(key, slot)`."""

            def add(step: Any, total: Any) -> Any:
                place = (step * groups + group) * _WIDE
                key = keys[pl.ds(place, _WIDE)]
                return total + jnp.where(holds(key, place), jnp.int32(1), jnp.int32(0))

            total = lax.fori_loop(0, padded // _WIDE // groups, add, jnp.zeros((_WIDE,), jnp.int32))
            found = jnp.sum(total)
            if groups == 1:
                return found
            half = turn % 2  # of the counts: the other half may still be read
            counts[half, group] = found
            meet()
            return sum((counts[half, other] for other in range(1, groups)), counts[half, 0])

        def add_bit(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            bit, threshold, _ = carry
            candidate = threshold | (jnp.int32(1) << bit)
            found = count(lambda key, _: key >= (candidate ^ least), bit)
            threshold = jnp.where(found >= budget, candidate, threshold)
            return bit - 1, threshold, found == budget

        # The bits of the threshold as unsigned numbers have them; keys are compared as signed.
        start = (jnp.int32(31), jnp.int32(0), jnp.bool_(False))
        turn, threshold, _ = lax.while_loop(
            lambda carry: (carry[0] >= 0) & ~carry[2], add_bit, start
        )
        signed = threshold ^ least
        room = budget - count(lambda key, _: key > signed, turn)
        equal = count(lambda key, _: key == signed, turn + 1)

        def add_slot_bit(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            bit, end, turn = carry
            candidate = end | (jnp.int32(1) << bit)

            def before(key: Any, place: Any) -> Any:
                slot = lax.broadcasted_iota(jnp.int32, (_WIDE,), 0) + place
                return (key == signed) & (slot < candidate)

            end = jnp.where(count(before, turn) <= room, candidate, end)
            return bit - 1, end, turn + 1

        all_stay = (room >= equal) | (signed == least)
        bits = jnp.where(all_stay, 0, padded.bit_length())
        begin = (bits - 1, jnp.where(all_stay, padded, 0), turn)
        _, end, _ = lax.while_loop(lambda carry: carry[0] >= 0, add_slot_bit, begin)

        def write(step: Any, _: None) -> None:
            place = (step * groups + group) * _PART
            key = keys[pl.ds(place, _PART)]
            slot = lax.broadcasted_iota(jnp.int32, (_PART,), 0) + place
            stays = (key > signed) | ((key == signed) & (key > least) & (slot < end))
            out[row, pl.ds(place, _PART)] = stays.astype(jnp.int8)

        lax.fori_loop(0, padded // _PART // groups, write, None)

    with jax.named_scope("keep_mask"):
        kept = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((rows, padded), jnp.int8),
            grid=(rows,),
            grid_names=("row",),
            num_threads=groups,
            thread_name="group",
            scratch_types=[
                plgpu.SMEM((padded,), jnp.int32),
                plgpu.SMEM((2, max(groups, 2)), jnp.int32),
                plgpu.Barrier(num_arrivals=groups),
            ],
            interpret=lowering.gpu_interpret(),
        )(
            scores.astype(jnp.float32).reshape(rows, slots),
            rank.reshape(rows, slots),
            valid.astype(jnp.int8).reshape(rows, slots),
            budgets.reshape(rows),
        )
    whole = slots // _PART * _PART
    behind = kept[:, whole + _PART - (slots - whole) : whole + _PART]  # of the part that overlaps
    kept = jnp.concatenate([kept[:, :whole], behind], axis=1) if slots > whole else kept[:, :whole]
    return (kept != 0).reshape(scores.shape)


def _order_key(scores: Any, rank: Any, valid: Any) -> Any:
    """`order.order_key` less 2**31, as int32."""
    least, infinity = jnp.int32(_LEAST), jnp.int32(0x7F800000)
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    bits = jnp.where(bits == least, jnp.int32(0), bits)
    key = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    key = jnp.where((bits & infinity) == infinity, least + 1, key)
    key = jnp.where(rank > 0, infinity + rank, key)
    return jnp.where(valid.astype(jnp.int32) != 0, key, least)
