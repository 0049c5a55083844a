"""Column sums and maxima of attention on Hopper GPUs: the logits never leave the chip.

Each program owns 128 slots of one query head: their keys stay in shared memory while the queries
that may see them pass by, slots in the rows of the matrix product so that sums over queries stay
within a warp. XLA's blocks would move 16 bytes per pair of query and slot through the L2 cache,
logits and weights written and read; this moves D x item size / 128, of queries: 2 bytes at D = 128
in bfloat16, 1 over the causal half that is visited with `first` and `last`.

FLOPs: 2 D per pair visited, in tiles of 128 slots x 64 queries, which is 1 + 192 / T times the
causal half of T tokens; one exponential per pair. Products of float32 operands are in tf32.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.blocks import pad_to
from kernels_pallas.attention.mask import NO_WINDOW
from kernels_pallas.column_attention.reference import Statistic
from kernels_pallas.lowering import decline_wrong_masks, gpu_interpret
from kernels_pallas.partition import partitioned
from kernels_pallas.warpgroup import swizzled
from kernels_pallas.window_scores.pallas_mosaic_gpu_sweeps import product

_SLOTS, _QUERIES = 128, 64  # of one tile
_FAR = 2**30
_SMEM_BYTES = 222 * 1024  # of the 227 KiB, for keys and queries


def _steps(dtype: Any) -> int:
    """Tiles of queries on their way."""
    return 2 if dtype == jnp.float32 else 3


@partitioned("B H Q D, B H Q, B K S D, B Q, B K S, -> B H S")
def column_attention(
    queries: Float[Array, "B H Q D"],
    lse: Float[Array, "B H Q"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    window: int | Int[Array, ""] = NO_WINDOW,
    *,
    statistic: Statistic = "sum",
) -> Float[Array, "B H S"]:
    """As the reference."""
    decline_wrong_masks()
    batch, heads, count, size = queries.shape
    kv_heads, slots = keys.shape[1:3]
    if statistic == "variance":
        raise NotImplementedError("statistic='variance': allowed are 'sum', 'mean' and 'max'")
    if queries.dtype != keys.dtype or keys.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"queries of {queries.dtype} and keys of {keys.dtype}: allowed are both bfloat16 or "
            "both float32"
        )
    row_bytes = size * keys.dtype.itemsize
    most = min(256 * keys.dtype.itemsize, _SMEM_BYTES // (_SLOTS + _steps(keys.dtype) * _QUERIES))
    if row_bytes % 32 or row_bytes > most:
        raise NotImplementedError(
            f"head size {size} of {keys.dtype}: allowed are multiples of 32 bytes, up to {most}"
        )
    if count < _QUERIES:
        raise NotImplementedError(
            f"{count} queries: allowed are at least {_QUERIES}; fewer are one dense pass"
        )
    # Tiled copies take whole tiles of 8 rows of an array, and read zeros behind its end.
    queries = pad_to(queries.reshape(batch * heads, count, size), 8, 1)
    keys = pad_to(keys.reshape(batch * kv_heads, slots, size), 8, 1)
    asked = pad_to(query_positions, _QUERIES, 1, fill=-1)
    held = pad_to(key_positions.reshape(batch * kv_heads, slots), _SLOTS, 1, fill=-1)
    # Queries without a normaliser weigh exp2(-large) = 0.
    offset = jnp.where(lse > -1e29, lse * math.log2(math.e), 1e30)
    offset = pad_to(offset.reshape(batch * heads, count), _QUERIES, 1)
    first, last = _tiles(asked, held, kv_heads, window)
    reach = jnp.broadcast_to(jnp.asarray(window, jnp.int32), (1,))
    found = _columns(queries, offset, keys, asked, held, first, last, reach, statistic == "max")
    found = found[:, :slots].reshape(batch, heads, slots)
    if statistic != "mean":
        return found
    seeing = jnp.maximum(_seeing(query_positions, key_positions, window), 1)
    by_group = found.reshape(batch, kv_heads, -1, slots) / seeing[:, :, None].astype(jnp.float32)
    return by_group.reshape(batch, heads, slots)


def _seeing(
    asked: Int[Array, "B Q"], held: Int[Array, "B K S"], window: int | Int[Array, ""]
) -> Int[Array, "B K S"]:
    """How many queries see each slot: those at positions from its own to before the window's end.

    From the queries' positions in order, so that no pair is looked at.
    """
    ordered = jnp.sort(asked, axis=1)
    before = jax.vmap(partial(jnp.searchsorted, method="scan_unrolled"))
    end = jnp.where(held > _FAR - window, _FAR, held + window)
    seeing = before(ordered, end) - before(ordered, held)
    return jnp.where(held >= 0, seeing, 0)


def _tiles(
    asked: Int[Array, "B P"],
    held: Int[Array, "BK S"],
    kv_heads: int,
    window: int | Int[Array, ""],
) -> tuple[Int[Array, "BK N"], Int[Array, "BK N"]]:
    """First and one past the last tile of queries that may see each tile of slots."""
    tiles = asked.reshape(asked.shape[0], -1, _QUERIES)
    newest = jnp.max(tiles, axis=2)
    oldest = jnp.min(jnp.where(tiles >= 0, tiles, _FAR), axis=2)
    blocks = held.reshape(held.shape[0], -1, _SLOTS)
    largest = jnp.max(blocks, axis=2)[..., None]
    smallest = jnp.min(jnp.where(blocks >= 0, blocks, _FAR), axis=2)[..., None]
    newest, oldest = (jnp.repeat(bound, kv_heads, axis=0)[:, None] for bound in (newest, oldest))
    seen = (smallest <= newest) & (largest > jnp.minimum(oldest, newest) - window)
    number = jnp.arange(tiles.shape[1], dtype=jnp.int32)[None, None]
    first = jnp.min(jnp.where(seen, number, _FAR), axis=2)
    last = jnp.max(jnp.where(seen, number + 1, 0), axis=2)
    return jnp.minimum(first, last), last


def _columns(
    queries: Float[Array, "BH Q D"],
    offset: Float[Array, "BH P"],
    keys: Float[Array, "BK S D"],
    asked: Int[Array, "B P"],
    held: Int[Array, "BK T"],
    first: Int[Array, "BK N"],
    last: Int[Array, "BK N"],
    reach: Int[Array, "1"],
    largest: bool,
) -> Float[Array, "BH T"]:
    size = keys.shape[2]
    heads = queries.shape[0] // asked.shape[0]
    group = queries.shape[0] // keys.shape[0]
    transforms = swizzled(size, keys.dtype)
    wide = (_SLOTS, _QUERIES)
    down, across = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    def kernel(
        query_gmem: Any,
        offset_gmem: Any,
        key_gmem: Any,
        asked_gmem: Any,
        held_gmem: Any,
        first_gmem: Any,
        last_gmem: Any,
        reach_gmem: Any,
        out_gmem: Any,
        key_smem: Any,
        held_smem: Any,
        out_smem: Any,
        arrived: Any,
    ) -> None:
        head, tile = lax.axis_index("head"), lax.axis_index("tile")
        kv_head, row = lax.div(head, group), lax.div(head, heads)
        own = pl.ds(tile * _SLOTS, _SLOTS)
        plgpu.copy_gmem_to_smem(key_gmem.at[kv_head, own], key_smem, arrived)
        plgpu.copy_gmem_to_smem(held_gmem.at[kv_head, own], held_smem, arrived)
        start, end = first_gmem[kv_head, tile], last_gmem[kv_head, tile]
        window = reach_gmem[0]
        plgpu.barrier_wait(arrived)

        def step(
            indices: Any, query_smem: Any, offset_smem: Any, asked_smem: Any, carry: Array
        ) -> Array:
            del indices
            products = product(key_smem, query_smem)
            slot = lax.broadcast_in_dim(plgpu.load(held_smem, layout=down), wide, [0])
            query = lax.broadcast_in_dim(plgpu.load(asked_smem, layout=across), wide, [1])
            total = lax.broadcast_in_dim(plgpu.load(offset_smem, layout=across), wide, [1])
            seen = (slot >= 0) & (slot <= query) & (slot > query - window)
            logits = products * (size**-0.5 * math.log2(math.e)) - total
            weights = jnp.where(seen, jnp.exp2(logits), 0.0)
            if largest:
                return jnp.maximum(carry, jnp.max(weights, axis=1))
            return carry + jnp.sum(weights, axis=1)

        out_smem[...] = plgpu.emit_pipeline(
            step,
            grid=(end - start,),
            in_specs=[
                plgpu.BlockSpec((_QUERIES, size), lambda i: (start + i, 0), transforms=transforms),
                plgpu.BlockSpec((_QUERIES,), lambda i: (start + i,)),
                plgpu.BlockSpec((_QUERIES,), lambda i: (start + i,)),
            ],
            max_concurrent_steps=_steps(keys.dtype),
            init_carry=plgpu.layout_cast(jnp.zeros((_SLOTS,), jnp.float32), down),
        )(query_gmem.at[head], offset_gmem.at[head], asked_gmem.at[row])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[head, own])
        plgpu.wait_smem_to_gmem(0)

    found: Array = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((queries.shape[0], held.shape[1]), jnp.float32),
        scratch_types=[
            plgpu.SMEM((_SLOTS, size), keys.dtype, transforms=transforms),
            plgpu.SMEM((_SLOTS,), jnp.int32),
            plgpu.SMEM((_SLOTS,), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(held.shape[1] // _SLOTS, queries.shape[0]),
        grid_names=("tile", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=gpu_interpret(),
        kernel_name="column_attention",
    )(queries, offset, keys, asked, held, first, last, reach)
    return found
