"""Window scores on TPU: keys from HBM once while a head's fit in VMEM, the logits never.

A softmax needs every logit's normaliser before weights can be added up over queries, so the grid
goes over a KV head's key blocks twice: for each row's largest logit and sum, then for the
weights. The first sweep leaves its blocks in VMEM, as many as `_KEPT_BYTES` hold, and the second
fetches only the rest. To keep the logits instead would take more: 4 G W bytes per slot, and D x
item size is 256 in bfloat16 at D = 128.

Per slot and KV head, with D x item size = d, that reads d bytes of keys (2 d of those that do
not fit), 8 of positions, and writes 4 (4 G without group reduction). FLOPs: 4 G W D for the
products of both sweeps, and 2 G W exponentials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas.lowering import tpu_interpret
from kernels_pallas.partition import partitioned
from kernels_pallas.window_scores.reference import OverGroup, OverQueries
from kernels_pallas.window_scores.rows import Rows, moment_shares, rows_of, score_shares

_LANES = 128
_SUBLANES = 8
_TILE_BYTES = 2**20  # of one block's float32 logits; a handful of such tiles are alive
_BLOCK_BYTES = 4 * 2**20  # of one block's keys, of which two are on their way
_KEPT_BYTES = 32 * 2**20  # of the 128 MiB of VMEM on v5e and v6e
_LOW = -1e30  # below every logit, and finite: exp(_LOW - _LOW) is no NaN

type Reduce = Callable[[Array, Array, Array], Sequence[Array]]


@partitioned("B H W D, B K S D, B W, B K S, B W -> B N S")
def window_scores(
    queries: Float[Array, "B H W D"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B W"],
    positions: Int[Array, "B K S"],
    query_weights: Float[Array, "B W"] | None = None,
    *,
    over_queries: OverQueries = "mean",
    over_group: OverGroup = "mean",
    window: int | Int[Array, ""] | None = None,
    kept_bytes: int = _KEPT_BYTES,
    block: int | None = None,
) -> Float[Array, "B N S"]:
    """As the reference. `kept_bytes` of keys stay in VMEM; `block` is a multiple of 128."""
    rows = _rows(queries, keys, query_positions, window)
    share = score_shares(
        query_positions, query_weights, rows, over_queries=over_queries, over_group=over_group
    )
    by_query = jnp.max if over_queries == "max" else jnp.sum
    by_group = jnp.max if over_group == "max" else jnp.sum

    def reduce(weights: Array, logs: Array, shares: Array) -> Sequence[Array]:
        del logs
        weighted = weights * shares[:, :1]
        if over_queries != "max" and over_group in ("sum", "mean"):
            return [jnp.sum(weighted, axis=0, keepdims=True)]
        parts = [by_query(part, axis=0, keepdims=True) for part in _heads(weighted, rows)]
        heads = jnp.concatenate(parts, axis=0)
        return [heads if over_group is None else by_group(heads, axis=0, keepdims=True)]

    count = rows.groups if over_group is None else 1
    (scores,) = _two_sweeps(
        rows, keys, positions, share[..., None], reduce, (count,), kept_bytes, block
    )
    return scores.reshape(keys.shape[0], -1, keys.shape[2])


@partitioned("B H W D, B K S D, B W, B K S -> B H S, B H S, B H S")
def window_moments(
    queries: Float[Array, "B H W D"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B W"],
    positions: Int[Array, "B K S"],
    *,
    window: int | Int[Array, ""] | None = None,
    kept_bytes: int = _KEPT_BYTES,
    block: int | None = None,
) -> tuple[Float[Array, "B H S"], Float[Array, "B H S"], Float[Array, "B H S"]]:
    """As the reference; the three leave one sweep, and write 12 G bytes per slot and KV head."""
    rows = _rows(queries, keys, query_positions, window)
    shares = jnp.stack(moment_shares(query_positions, rows), axis=-1)

    def reduce(weights: Array, logs: Array, shares: Array) -> Sequence[Array]:
        parts = zip(*(_heads(array, rows) for array in (weights, logs, shares)), strict=True)
        moments = []
        for weight, log, share in parts:
            mean = jnp.sum(weight * share[:, :1], axis=0, keepdims=True)
            squares = jnp.square(weight - mean) * share[:, 1:]
            variance = jnp.sum(squares, axis=0, keepdims=True)
            moments.append((mean, variance, -jnp.sum(weight * log, axis=0, keepdims=True)))
        return [jnp.concatenate(heads, axis=0) for heads in zip(*moments, strict=True)]

    batch, heads, slots = keys.shape[0], queries.shape[1], keys.shape[2]
    mean, variance, entropy = _two_sweeps(
        rows, keys, positions, shares, reduce, (rows.groups,) * 3, kept_bytes, block
    )
    shape = (batch, heads, slots)
    return mean.reshape(shape), variance.reshape(shape), entropy.reshape(shape)


def _rows(queries: Array, keys: Array, query_positions: Array, window: Any) -> Rows:
    if queries.dtype != keys.dtype or keys.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"queries of {queries.dtype} and keys of {keys.dtype}: allowed are both bfloat16 or "
            "both float32"
        )
    rows = rows_of(queries, query_positions, keys.shape[1], window, multiple=_SUBLANES)
    if rows.queries.shape[1] > 2048:
        raise NotImplementedError(
            f"{rows.groups} heads x {rows.width} queries share a KV head: allowed are 2048 rows"
        )
    return rows


def _heads(array: Array, rows: Rows) -> list[Array]:
    return [array[g * rows.width : (g + 1) * rows.width] for g in range(rows.groups)]


def _two_sweeps(
    rows: Rows,
    keys: Float[Array, "B K S D"],
    positions: Int[Array, "B K S"],
    shares: Float[Array, "B R C"],
    reduce: Reduce,
    outputs: tuple[int, ...],
    kept_bytes: int,
    block: int | None,
) -> list[Float[Array, "BK N S"]]:
    """`reduce(weights, their logarithms, shares)` of every block of slots, blocks in the lanes."""
    batch, kv_heads, slots, head_dim = keys.shape
    count = rows.queries.shape[1]
    # The lanes of a row are padded to 128 in VMEM.
    row_bytes = -(-head_dim // _LANES) * _LANES * keys.dtype.itemsize
    if block is None:
        most = min(_TILE_BYTES // (4 * count), _BLOCK_BYTES // row_bytes)
        block = max(most // _LANES * _LANES, _LANES)
    block = min(block, slots)
    blocks = pl.cdiv(slots, block)
    block_bytes = block * row_bytes
    kept = min(kept_bytes // block_bytes, blocks)
    bounds = jnp.stack([rows.oldest, rows.newest], axis=-1)
    scale = head_dim**-0.5

    def kernel(
        query_ref: Any, bound_ref: Any, share_ref: Any, key_ref: Any, position_ref: Any, *refs: Any
    ) -> None:
        out_refs, (largest_ref, total_ref, *kept_ref) = refs[: len(outputs)], refs[len(outputs) :]
        sweep, step = pl.program_id(1), pl.program_id(2)

        def logits_of(key_block: Array) -> tuple[Array, Array]:
            # float32 operands would otherwise be rounded to bfloat16.
            precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
            logits = lax.dot_general(
                query_ref[0],
                key_block,
                (((1,), (1,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            held, bound = position_ref[0], bound_ref[0]
            seen = (held >= bound[:, :1]) & (held <= bound[:, 1:])
            if slots % block:  # behind the last slot the block holds anything
                place = lax.broadcasted_iota(jnp.int32, (1, block), 1) + step * block
                seen &= place < slots
            return jnp.where(seen, logits * scale, _LOW), seen

        @pl.when((sweep == 0) & (step == 0))
        def _start() -> None:
            largest_ref[...] = jnp.full_like(largest_ref, _LOW)
            total_ref[...] = jnp.zeros_like(total_ref)

        @pl.when(sweep == 0)
        def _normalise() -> None:
            if kept:

                @pl.when(step < kept)
                def _keep() -> None:
                    kept_ref[0][step] = key_ref[0]

            logits, seen = logits_of(key_ref[0])
            before = largest_ref[...]
            now = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
            mass = jnp.where(seen, jnp.exp(logits - now), 0.0)
            added = jnp.sum(mass, axis=1, keepdims=True)
            total_ref[...] = total_ref[...] * jnp.exp(before - now) + added
            largest_ref[...] = now

        def write(key_block: Array) -> None:
            logits, seen = logits_of(key_block)
            total = total_ref[...]
            inverse = 1.0 / jnp.where(total > 0, total, 1.0)
            logs = logits - largest_ref[...]
            weights = jnp.where(seen, jnp.exp(logs), 0.0) * inverse
            logs = jnp.where(seen, logs + jnp.log(inverse), 0.0)
            reduced = reduce(weights, logs, share_ref[0])
            for out_ref, values in zip(out_refs, reduced, strict=True):
                out_ref[0] = values

        if kept:

            @pl.when((sweep == 1) & (step < kept))
            def _from_vmem() -> None:
                write(kept_ref[0][jnp.minimum(step, kept - 1)])

        if kept < blocks:

            @pl.when((sweep == 1) & (step >= kept))
            def _from_hbm() -> None:
                write(key_ref[0])

    def fetched(head: Array, sweep: Array, step: Array) -> tuple[Any, ...]:
        # The second sweep rests on the first block that it will need.
        resting = jnp.maximum(step, min(kept, blocks - 1))
        return head, jnp.where(sweep == 0, step, resting), 0

    row_spec = partial(pl.BlockSpec, index_map=lambda head, sweep, step: (head // kv_heads, 0, 0))
    out = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((batch * kv_heads, n, slots), jnp.float32) for n in outputs
        ],
        grid=(batch * kv_heads, 2, blocks),
        in_specs=[
            pl.BlockSpec((1, count, head_dim), lambda head, sweep, step: (head, 0, 0)),
            row_spec((1, count, 2)),
            row_spec((1, count, shares.shape[2])),
            pl.BlockSpec((1, block, head_dim), fetched),
            pl.BlockSpec((1, 1, block), lambda head, sweep, step: (head, 0, step)),
        ],
        # Nothing is written in the first sweep: it stays on the block that the second starts with.
        out_specs=[
            pl.BlockSpec((1, n, block), lambda head, sweep, step: (head, 0, step * sweep))
            for n in outputs
        ],
        scratch_shapes=[
            pltpu.VMEM((count, 1), jnp.float32),
            pltpu.VMEM((count, 1), jnp.float32),
            *([pltpu.VMEM((kept, block, head_dim), keys.dtype)] if kept else []),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=min(kept * block_bytes + 24 * 2**20, 100 * 2**20),
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * kv_heads * count * slots * head_dim,
            transcendentals=2 * batch * kv_heads * count * slots,
            bytes_accessed=batch
            * kv_heads
            * ((blocks + blocks - kept) * block * head_dim * keys.dtype.itemsize + 12 * slots),
        ),
        interpret=tpu_interpret(),
        name="window_scores",
    )(
        rows.queries,
        bounds,
        shares,
        keys.reshape(batch * kv_heads, slots, head_dim),
        positions.reshape(batch * kv_heads, 1, slots),
    )
    return list(out)
