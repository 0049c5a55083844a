"""Pooled maximum on TPU: a block of keys stays while the queries that see it stream past.

Keys lie along sublanes and queries along lanes. A step takes one block of queries and some of its
heads; the reduction over heads, the largest score so far and the block of queries that gave it are
tiles [key_block, query_block] in VMEM, and only the last step of a block of keys looks along
lanes. Blocks of queries that see nothing of a block of keys are neither read nor computed; their
steps of the grid stay, empty.

Products of bfloat16 are exact and summed in float32; those of float32 are at HIGHEST precision
(six bfloat16 products each). For T queries that see all S keys, H heads of size D:
2 H T S D FLOPs on the MXU and about (4 to 6) H T S on the VPU; HBM reads are the keys once and the
queries once per block of keys, H T D (S / key_block) numbers: key_block FLOPs per byte in bfloat16.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas import lowering
from kernels_pallas.attention.blocks import pad_to
from kernels_pallas.partition import partitioned
from kernels_pallas.pooled_max.pairs import Rule, Tensors
from kernels_pallas.pooled_max.parts import AXES, NOBODY, join, query_ranges, rows
from kernels_pallas.retention_attention.segments import Tokens

_LANES = 128
_QUERY_BYTES = 2**20  # of one step's queries
_VECTOR_BYTES = 4 * 2**20  # of queries and keys, two buffers each, beside 8 MiB of tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Rows and columns of the score tiles, multiples of 128."""

    keys: int
    queries: int

    @classmethod
    def choose(cls, slots: int, length: int, itemsize: int) -> Blocks:
        """Four tiles of at most 2 MiB, or of 1 MiB where operands are wider."""
        return cls(
            keys=min(1024 if itemsize == 2 else 512, _whole(slots)),
            queries=min(512, _whole(length)),
        )


@partitioned(AXES)
def pooled_max(
    rule: Rule, tensors: Tensors, asking: Tokens, held: Tokens, *, blocks: Blocks | None = None
) -> tuple[Float[Array, "B S"], Int[Array, "B S"]]:
    """As the reference, for float32 and bfloat16."""
    dtype = tensors.keys.dtype
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"keys are {dtype}: served are float32 and bfloat16")
    batch, slots = held.positions.shape
    (queries, keys, weights, offsets), share = rows(rule, tensors)
    count, heads, length, size = queries.shape
    if blocks is None:
        blocks = Blocks.choose(slots, length, dtype.itemsize)
    asking, held = asking.padded(blocks.queries), held.padded(blocks.keys)
    first, last = query_ranges(asking, held, blocks.queries, blocks.keys)
    key_blocks = first.shape[1]
    query_blocks = asking.positions.shape[1] // blocks.queries
    group = heads // keys.shape[1]
    # Rows of fewer numbers than lanes would be padded to them, in HBM too: tokens go there instead.
    upright = size < _LANES
    if upright:
        queries, keys = jnp.swapaxes(queries, 2, 3), jnp.swapaxes(keys, 2, 3)
    per_head = blocks.queries * size * dtype.itemsize
    most = max(_QUERY_BYTES // per_head, 1)
    together = max(n for n in range(1, group + 1) if group % n == 0 and n <= most)
    head_steps = heads // together
    vectors_bytes = 2 * (together * per_head + blocks.keys * size * dtype.itemsize)
    if vectors_bytes > _VECTOR_BYTES:
        raise NotImplementedError(
            f"{vectors_bytes} bytes of queries and keys of size {size} at a time: allowed are "
            f"{_VECTOR_BYTES}"
        )

    def asked(row: Array, j: Array, i: Array, first: Any, last: Any) -> Array:
        """The block of queries of a step; steps behind the last one stay there: no new copy."""
        at = row // share * key_blocks + j
        return jnp.clip(first[at] + i, 0, jnp.maximum(last[at] - 1, 0))

    def step(row: Array, j: Array, i: Array, h: Array, first: Any, last: Any) -> Array:
        at = row // share * key_blocks + j
        return jnp.where(first[at] + i < last[at], h, head_steps - 1)

    def vectors(heads: int, tokens: int, index: Any) -> pl.BlockSpec:
        """Blocks of [R, H, T, D], or of [R, H, D, T] if upright, at (row, head, token)."""
        if upright:
            return pl.BlockSpec((1, heads, size, tokens), lambda *at: _upright(*index(*at)))
        return pl.BlockSpec((1, heads, tokens, size), lambda *at: (*index(*at), 0))

    def query_map(row: Array, j: Array, i: Array, h: Array, *ranges: Any) -> tuple[Any, ...]:
        return row, step(row, j, i, h, *ranges), asked(row, j, i, *ranges)

    def key_map(row: Array, j: Array, i: Array, h: Array, *ranges: Any) -> tuple[Any, ...]:
        return row, step(row, j, i, h, *ranges) * together // group, j

    def number_map(row: Array, j: Array, i: Array, h: Array, *ranges: Any) -> tuple[Any, ...]:
        return row, step(row, j, i, h, *ranges), 0, asked(row, j, i, *ranges)

    numbers = [array for array in (weights, offsets) if array is not None]
    numbers = [
        pad_to(array, blocks.queries, 2).reshape(count, head_steps, together, -1)
        for array in numbers
    ]
    result = pl.BlockSpec((1, 1, blocks.keys), lambda row, j, i, h, *_: (row, 0, j))
    tile = (blocks.keys, blocks.queries)
    kernel = partial(
        _kernel,
        rule=rule,
        share=share,
        weighted=weights is not None,
        offset=offsets is not None,
        upright=upright,
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT,
    )
    with jax.named_scope("pooled_max"):
        largest, query = pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(count, key_blocks, query_blocks, head_steps),
                in_specs=[
                    vectors(together, blocks.queries, query_map),
                    vectors(1, blocks.keys, key_map),
                    pl.BlockSpec(
                        (1, 2, blocks.queries),
                        lambda row, j, i, h, *ranges: (
                            row // share,
                            0,
                            asked(row, j, i, *ranges),
                        ),
                    ),
                    pl.BlockSpec((1, 8, blocks.keys), lambda row, j, *_: (row // share, 0, j)),
                    *(pl.BlockSpec((1, 1, together, blocks.queries), number_map) for _ in numbers),
                ],
                out_specs=[result, result],
                scratch_shapes=[
                    pltpu.VMEM((blocks.keys, 8), jnp.int32),
                    pltpu.VMEM(tile, jnp.float32),
                    pltpu.VMEM(tile, jnp.float32),
                    pltpu.VMEM(tile, jnp.int32),
                ],
            ),
            out_shape=[
                jax.ShapeDtypeStruct((count, 1, held.positions.shape[1]), dtype)
                for dtype in (jnp.float32, jnp.int32)
            ],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")
            ),
            cost_estimate=pl.CostEstimate(
                flops=2 * count * heads * length * slots * size,
                bytes_accessed=(key_blocks * queries.size + keys.size) * dtype.itemsize,
                transcendentals=0,
            ),
            interpret=lowering.tpu_interpret(),
        )(
            first.reshape(-1),
            last.reshape(-1),
            queries,
            keys,
            jnp.stack(asking, axis=1),
            pad_to(jnp.stack(held, axis=1), 8, 1),
            *numbers,
        )
    parts = (batch, share, -1)
    return join(largest.reshape(parts)[..., :slots], query.reshape(parts)[..., :slots])


def _kernel(
    first_ref: Any,
    last_ref: Any,
    query_ref: Any,
    key_ref: Any,
    asking_ref: Any,
    held_ref: Any,
    *refs: Any,
    rule: Rule,
    share: int,
    weighted: bool,
    offset: bool,
    upright: bool,
    precision: lax.Precision,
) -> None:
    numbers = list(refs[:-6])
    weight_ref = numbers.pop(0) if weighted else None
    offset_ref = numbers.pop(0) if offset else None
    largest_ref, found_ref, held_columns, total_ref, best_ref, block_ref = refs[-6:]
    row, j, i, h = (pl.program_id(axis) for axis in range(4))
    at = row // share * pl.num_programs(1) + j
    block = first_ref[at] + i
    some = block < last_ref[at]
    together, queries = query_ref.shape[1], asking_ref.shape[2]

    @pl.when((i == 0) & (h == 0))
    def _start() -> None:
        held_columns[...] = held_ref[0].T
        best_ref[...] = jnp.full_like(best_ref, -jnp.inf)
        block_ref[...] = jnp.zeros_like(block_ref)

    @pl.when(some & (h == 0))
    def _no_heads() -> None:
        total_ref[...] = jnp.full_like(total_ref, 0 if rule.reduce == "sum" else -jnp.inf)

    @pl.when(some)
    def _heads() -> None:
        def one(head: Array, _: None) -> None:
            scores = lax.dot_general(
                key_ref[0, 0],
                query_ref[0, head],
                (((0,), (0,)) if upright else ((1,), (1,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            scores = scores * jnp.float32(rule.scale)
            if offset_ref is not None:
                scores = scores - offset_ref[0, 0, pl.ds(head, 1), :]
            if rule.activation == "relu":
                scores = jnp.maximum(scores, jnp.float32(0))
            if weight_ref is not None:
                scores = scores * weight_ref[0, 0, pl.ds(head, 1), :]
            total = total_ref[...]
            total_ref[...] = jnp.maximum(total, scores) if rule.reduce == "max" else total + scores

        lax.fori_loop(0, together, one, None)

    @pl.when(some & (h == pl.num_programs(3) - 1))
    def _keep_the_larger() -> None:
        positions, segments = held_columns[:, 0:1], held_columns[:, 1:2]
        asked_at, asked_in = asking_ref[0, 0:1, :], asking_ref[0, 1:2, :]
        seen = (positions >= 0) & (positions <= asked_at) & (segments == asked_in)
        scores = jnp.where(seen, total_ref[...], -jnp.inf)
        best = best_ref[...]
        better = scores > best  # not equal: the earlier query stays
        best_ref[...] = jnp.where(better, scores, best)
        block_ref[...] = jnp.where(better, block, block_ref[...])

    @pl.when((i == pl.num_programs(2) - 1) & (h == pl.num_programs(3) - 1))
    def _look_along_lanes() -> None:
        best, blocks = best_ref[...], block_ref[...]
        found = blocks * queries + lax.broadcasted_iota(jnp.int32, best.shape, 1)
        parts = [slice(start, start + _LANES) for start in range(0, queries, _LANES)]
        largest, first = best[:, parts[0]], found[:, parts[0]]
        for part in parts[1:]:
            other, its = best[:, part], found[:, part]
            better = (other > largest) | ((other == largest) & (its < first))
            largest, first = jnp.where(better, other, largest), jnp.where(better, its, first)
        largest, first = largest.T, first.T
        top = jnp.max(largest, axis=0, keepdims=True)
        largest_ref[0] = top
        found_ref[0] = jnp.min(jnp.where(largest == top, first, NOBODY), axis=0, keepdims=True)


def _upright(row: Any, head: Any, token: Any) -> tuple[Any, ...]:
    return row, head, 0, token


def _whole(length: int) -> int:
    return -(-length // _LANES) * _LANES
