"""Pooled maximum on Hopper: two warpgroups hold 64 keys each while a third streams queries past.

Products come from the tensor cores, keys as rows and queries as columns of a tile of 64 x 64. The
reduction over heads, the largest score so far and the block of queries that gave it stay in
registers; only behind the last query does a thread look along its rows. Blocks of queries that see
nothing of a block of keys are not read. Where there are fewer blocks of keys than processors, their
queries are divided, and the parts joined outside.

Products of bfloat16 are exact and summed in float32. A float32 operand is cut into two bfloat16
(high and low halves of its mantissa), and three of the four products are taken: about 2^-16 of
|q| |k|, where one tf32 product would be off by 2^-11. For T queries that see all S keys, H heads of
size D: 2 H T S D FLOPs on the tensor cores (three times that for float32) and 4 to 6 H T S in
float32; the queries, H T D numbers, are read from L2 or HBM once per 128 keys: 128 FLOPs per byte
in bfloat16. Keys are read once, but for a "sum" over several KV heads once per block of queries.
Queries and keys are copied beforehand where they are float32, or no multiple of 8 long or of 16
wide: the hardware's copies into swizzled tiles ask for that.
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
from kernels_pallas.halves import halves, products
from kernels_pallas.partition import partitioned
from kernels_pallas.pooled_max.mosaic_gpu_blocks import HELD, WARPGROUPS, Blocks, choose
from kernels_pallas.pooled_max.pairs import Rule, Tensors
from kernels_pallas.pooled_max.parts import AXES, NOBODY, join, query_ranges, rows
from kernels_pallas.retention_attention.segments import Tokens
from kernels_pallas.warpgroup import swizzled


@partitioned(AXES)
def pooled_max(
    rule: Rule, tensors: Tensors, asking: Tokens, held: Tokens, *, splits: int | None = None
) -> tuple[Float[Array, "B S"], Int[Array, "B S"]]:
    """As the reference, for float32 and bfloat16."""
    lowering.decline_wrong_masks()
    dtype = tensors.keys.dtype
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"keys are {dtype}: served are float32 and bfloat16")
    batch, slots = held.positions.shape
    (queries, keys, weights, offsets), share = rows(rule, tensors)
    count, heads = queries.shape[:2]
    group = heads // keys.shape[1]
    key_block = HELD * WARPGROUPS
    # Copies nothing at lengths of whole rows of eight, which a tile in shared memory is made of.
    operands = [halves(pad_to(pad_to(array, 16, 3), 8, 2)) for array in (queries, keys)]
    size, terms = operands[0][0].shape[3], len(operands[0])
    key_blocks = -(-slots // key_block)
    blocks = choose(count * key_blocks, queries.shape[2], size * terms * 2, group < heads)
    if splits is not None:
        blocks = dataclasses.replace(blocks, splits=splits)
    asking, held = asking.padded(blocks.queries), held.padded(key_block)
    first, last = query_ranges(asking, held, blocks.queries, key_block)
    numbers = [
        pad_to(array, blocks.queries, 2) for array in (weights, offsets) if array is not None
    ]
    streamed = group < heads  # keys with their queries, as a tile needs those of several KV heads
    transforms = swizzled(size, jnp.bfloat16)

    def shared(copies: int, tokens: int) -> list[Any]:
        shape = (copies, tokens, size)
        return [plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms) for _ in range(terms)]

    padded = held.positions.shape[1]
    kernel = plgpu.kernel(
        _Body(
            rule=rule,
            blocks=blocks,
            heads=heads,
            group=group,
            share=share,
            terms=terms,
            weighted=weights is not None,
            offset=offsets is not None,
            streamed=streamed,
        ),
        out_type=[
            jax.ShapeDtypeStruct((count, blocks.splits, padded), kind)
            for kind in (jnp.float32, jnp.int32)
        ],
        scratch_types={
            "queries": shared(blocks.stages, blocks.queries),
            "keys": shared(blocks.stages if streamed else 1, key_block),
            "asking": plgpu.SMEM((blocks.stages, 2, blocks.queries), jnp.int32),
            "numbers": [plgpu.SMEM((blocks.stages, blocks.queries), jnp.float32) for _ in numbers],
            "held": plgpu.SMEM((2, key_block), jnp.int32),
            "largest": plgpu.SMEM((key_block,), jnp.float32),
            "found": plgpu.SMEM((key_block,), jnp.int32),
            "filled": plgpu.Barrier(
                num_arrivals=terms * (1 + streamed) + 1 + len(numbers), num_barriers=blocks.stages
            ),
            "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=blocks.stages),
            "held_filled": plgpu.Barrier(num_arrivals=1 + terms * (not streamed)),
        },
        grid=(count, blocks.splits, key_blocks),
        grid_names=("row", "split", "key_block"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=lowering.gpu_interpret(),
    )
    with jax.named_scope("pooled_max"):
        largest, query = kernel(
            *operands[0],
            *operands[1],
            jnp.stack(asking, axis=1),
            jnp.stack(held, axis=1),
            first,
            last,
            *numbers,
        )
    parts = (batch, share * blocks.splits, padded)
    return join(largest.reshape(parts)[..., :slots], query.reshape(parts)[..., :slots])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Body:
    """The kernel. Refs in order: halves of queries, of keys, asking, held, first, last, numbers."""

    rule: Rule
    blocks: Blocks
    heads: int
    group: int
    share: int
    terms: int
    weighted: bool
    offset: bool
    streamed: bool

    __name__ = "pooled_max"

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        operands, outputs = refs[:-2], refs[-2:]
        row = lax.axis_index("row")
        block = lax.axis_index("key_block")
        split = lax.axis_index("split")
        of = lax.div(row, jnp.int32(self.share))
        first_ref, last_ref = operands[2 * self.terms + 2 : 2 * self.terms + 4]
        first = first_ref[of, block]
        count = last_ref[of, block] - first
        splits = jnp.int32(self.blocks.splits)
        start = first + lax.div(count * split, splits)
        stop = first + lax.div(count * (split + 1), splits)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == WARPGROUPS)
        def _producer() -> None:
            plgpu.set_max_registers(40, action="decrease")
            self.stream(operands, scratch, row, of, block, start, stop)

        @pl.when(warpgroup < WARPGROUPS)
        def _consumer() -> None:
            plgpu.set_max_registers(232, action="increase")
            at = pl.ds(warpgroup * HELD, HELD)
            largest, found = self.scan(scratch, at, start, stop)
            scratch["largest"].at[at][...] = largest
            scratch["found"].at[at][...] = found
            plgpu.commit_smem()
            to = pl.ds(block * (HELD * WARPGROUPS) + warpgroup * HELD, HELD)
            for name, ref in zip(("largest", "found"), outputs, strict=True):
                plgpu.copy_smem_to_gmem(scratch[name].at[at], ref.at[row, split, to])
            plgpu.wait_smem_to_gmem(0)

    def stream(
        self, operands: Any, scratch: Any, row: Any, of: Any, block: Any, start: Any, stop: Any
    ) -> None:
        """Copies the keys, and head by head the queries of every block."""
        terms, queries = self.terms, self.blocks.queries
        query_refs, key_refs = operands[:terms], operands[terms : 2 * terms]
        asking_ref, held_ref = operands[2 * terms : 2 * terms + 2]
        number_refs = operands[2 * terms + 4 :]
        keys_at = pl.ds(block * (HELD * WARPGROUPS), HELD * WARPGROUPS)
        plgpu.copy_gmem_to_smem(
            held_ref.at[of, :, keys_at], scratch["held"], scratch["held_filled"]
        )
        if not self.streamed:
            for source, shared in zip(key_refs, scratch["keys"], strict=True):
                plgpu.copy_gmem_to_smem(
                    source.at[row, 0, keys_at], shared.at[0], scratch["held_filled"]
                )

        stages, steps = jnp.int32(self.blocks.stages), (stop - start) * self.heads

        @pl.loop(0, steps)
        def _step(step: Any) -> None:
            slot = lax.rem(step, stages)
            head = lax.rem(step, jnp.int32(self.heads))
            at = pl.ds((start + lax.div(step, jnp.int32(self.heads))) * queries, queries)

            @pl.when(step >= stages)
            def _wait() -> None:
                plgpu.barrier_wait(scratch["free"].at[slot])

            filled = scratch["filled"].at[slot]
            for source, shared in zip(query_refs, scratch["queries"], strict=True):
                plgpu.copy_gmem_to_smem(source.at[row, head, at], shared.at[slot], filled)
            if self.streamed:
                kv_head = lax.div(head, jnp.int32(self.group))
                for source, shared in zip(key_refs, scratch["keys"], strict=True):
                    plgpu.copy_gmem_to_smem(
                        source.at[row, kv_head, keys_at], shared.at[slot], filled
                    )
            plgpu.copy_gmem_to_smem(asking_ref.at[of, :, at], scratch["asking"].at[slot], filled)
            for source, shared in zip(number_refs, scratch["numbers"], strict=True):
                plgpu.copy_gmem_to_smem(source.at[row, head, at], shared.at[slot], filled)

        @pl.loop(jnp.maximum(steps - stages, 0), steps)
        def _drain(step: Any) -> None:
            plgpu.barrier_wait(scratch["free"].at[lax.rem(step, stages)])

    def scan(
        self, scratch: Any, at: Any, start: Any, stop: Any
    ) -> tuple[Float[Array, " N"], Int[Array, " N"]]:
        """The largest score of a warpgroup's keys, and the first query that reaches it."""
        tile = (HELD, self.blocks.queries)
        by_row, by_column = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

        def full(value: Any) -> Array:
            return plgpu.layout_cast(jnp.full(tile, value), plgpu.Layout.WGMMA)

        def along(ref: Any, layout: Any) -> Array:
            return lax.broadcast_in_dim(
                plgpu.load(ref, layout=layout, optimized=False),
                tile,
                [0 if layout is by_row else 1],
            )

        plgpu.barrier_wait(scratch["held_filled"])

        def one_block(index: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            best, found = carry
            step = (index - start) * self.heads

            def one_head(head: Any, total: Array) -> Array:
                slot = lax.rem(step + head, jnp.int32(self.blocks.stages))
                plgpu.barrier_wait(scratch["filled"].at[slot])
                scores = self.products(scratch, at, slot) * jnp.float32(self.rule.scale)
                numbers = list(scratch["numbers"])
                weights = numbers.pop(0) if self.weighted else None
                if self.offset:
                    scores = scores - along(numbers[0].at[slot], by_column)
                if self.rule.activation == "relu":
                    scores = jnp.maximum(scores, jnp.float32(0))
                if weights is not None:
                    scores = scores * along(weights.at[slot], by_column)

                # The last head's slot holds the positions until they are compared.
                @pl.when(head < self.heads - 1)
                def _free() -> None:
                    plgpu.barrier_arrive(scratch["free"].at[slot])

                return jnp.maximum(total, scores) if self.rule.reduce == "max" else total + scores

            nothing = jnp.float32(0 if self.rule.reduce == "sum" else -jnp.inf)
            scores = lax.fori_loop(0, self.heads, one_head, full(nothing))
            slot = lax.rem(step + self.heads - 1, jnp.int32(self.blocks.stages))
            positions, segments = (along(scratch["held"].at[n, at], by_row) for n in range(2))
            asked_at, asked_in = (along(scratch["asking"].at[slot, n], by_column) for n in range(2))
            seen = (positions >= 0) & (positions <= asked_at) & (segments == asked_in)
            plgpu.barrier_arrive(scratch["free"].at[slot])
            scores = jnp.where(seen, scores, full(jnp.float32(-jnp.inf)))
            better = scores > best  # not equal: the earlier query stays
            here = lax.broadcast_in_dim(index, tile, [])
            return jnp.where(better, scores, best), jnp.where(better, here, found)

        best, found = lax.fori_loop(
            start, stop, one_block, (full(jnp.float32(-jnp.inf)), full(jnp.int32(0)))
        )
        column = plgpu.broadcasted_iota(jnp.int32, tile, 1, layout=plgpu.Layout.WGMMA)
        largest = jnp.max(best, axis=1)
        reached = best == lax.broadcast_in_dim(largest, tile, [0])
        queries = jnp.where(reached, found * self.blocks.queries + column, full(jnp.int32(NOBODY)))
        return largest, jnp.min(queries, axis=1)

    def products(self, scratch: Any, at: Any, slot: Any) -> Float[Array, "N Q"]:
        """Products of a warpgroup's keys with a head's queries."""
        keys = [ref.at[slot if self.streamed else 0, at] for ref in scratch["keys"]]
        queries = [ref.at[slot].transpose((1, 0)) for ref in scratch["queries"]]

        def multiply(sum_ref: Any) -> Array:
            for first, second in products(self.terms):
                plgpu.wgmma(sum_ref, keys[first], queries[second])
            return sum_ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((HELD, self.blocks.queries), jnp.float32))
