"""The two sweeps over the keys on Hopper GPUs: normalisers of every row, reductions of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.blocks import pad_to
from kernels_pallas.lowering import gpu_interpret
from kernels_pallas.warpgroup import swizzled
from kernels_pallas.window_scores.rows import Rows

ROW_TILE = 64  # rows of a warpgroup's matrix product
LOW = -1e30  # below every logit, and finite: exp2(LOW - LOW) is no NaN

# From the weights of some rows of one query head, slots first, their logarithms and their shares,
# to one value per slot and output.
type Reduce = Callable[[Array, Array, Sequence[Array]], Sequence[Array]]
type Combine = Callable[[Array, Array], Array]


def _logits(products: Array, held: Array, oldest: Array, newest: Array, scale: float) -> Array:
    """Scaled to powers of two, LOW where a row does not see the slot."""
    seen = (held >= oldest) & (held <= newest)
    return jnp.where(seen, products * (scale * math.log2(math.e)), LOW)


def block_bytes(keys: Float[Array, "*n S D"], block: int) -> int:
    """Shared memory of one block of keys and its positions, in either sweep."""
    return block * (keys.shape[-1] * keys.dtype.itemsize + 4)


def shared_bytes(rows: Rows, dtype: Any, shares: int, outputs: int, block: int) -> int:
    """Shared memory beside the blocks of keys, in the sweep that takes more of it."""
    _, count, head_dim = rows.queries.shape
    row_bytes = head_dim * jnp.dtype(dtype).itemsize
    padded = -(-count // ROW_TILE) * ROW_TILE
    first = padded * (row_bytes + 4 * (2 + 2))  # queries, their bounds and their state
    bounds_and_shares = 4 * rows.width * (2 + shares)
    second = count * (row_bytes + 4) + bounds_and_shares + 2 * 4 * outputs * block
    return max(first, second)


def product(left: Any, right: Any) -> Array:
    """left @ right^T of two tiles in shared memory."""

    def multiply(out: Any) -> Array:
        plgpu.wgmma(out, left, right.transpose((1, 0)))
        return out[...]

    shape = (left.shape[0], right.shape[0])
    product: Array = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
    return product


def normalisers(
    rows: Rows,
    keys: Float[Array, "BK S D"],
    held: Int[Array, "BK P"],
    kv_heads: int,
    layout: tuple[int, int, int, int],
) -> tuple[Float[Array, "BK N R"], Float[Array, "BK N R"]]:
    """Each row's largest logit and its sum of exponentials in every part, to the base 2."""
    block, steps, per_part, parts = layout
    heads, _, head_dim = keys.shape
    count = rows.queries.shape[1]
    queries = pad_to(rows.queries, ROW_TILE, 1)
    tiles = queries.shape[1] // ROW_TILE
    bounds = jnp.stack(
        [pad_to(rows.oldest, ROW_TILE, 1), pad_to(rows.newest, ROW_TILE, 1, fill=-1)], axis=1
    ).reshape(-1, 2, tiles, ROW_TILE)
    transforms = swizzled(head_dim, keys.dtype)

    def kernel(
        query_gmem: Any,
        bound_gmem: Any,
        key_gmem: Any,
        held_gmem: Any,
        out_gmem: Any,
        query_smem: Any,
        bound_smem: Any,
        state_smem: Any,
        arrived: Any,
    ) -> None:
        head, part = lax.axis_index("head"), lax.axis_index("part")
        for tile in range(tiles):
            piece = query_gmem.at[head, pl.ds(tile * ROW_TILE, ROW_TILE)]
            plgpu.copy_gmem_to_smem(piece, query_smem.at[tile], arrived)
        plgpu.copy_gmem_to_smem(bound_gmem.at[lax.div(head, kv_heads)], bound_smem, arrived)
        across, down = plgpu.Layout.WGMMA.reduce(0), plgpu.Layout.WGMMA.reduce(1)
        wide = (ROW_TILE, block)
        for tile in range(tiles):
            for kind, value in enumerate((LOW, 0.0)):
                filled = jnp.full((ROW_TILE,), value, jnp.float32)
                state_smem[kind, tile] = plgpu.layout_cast(filled, down)
        plgpu.barrier_wait(arrived)

        def step(indices: Any, key_smem: Any, held_smem: Any) -> None:
            del indices

            # A loop, and the state in shared memory: unrolled, the tiles' registers spill.
            @pl.loop(0, tiles)
            def _each_tile(tile: Array) -> None:
                products = product(query_smem.at[tile], key_smem)
                slot = plgpu.load(held_smem, layout=across)
                oldest = plgpu.load(bound_smem.at[0, tile], layout=down)
                newest = plgpu.load(bound_smem.at[1, tile], layout=down)
                logits = _logits(
                    products,
                    lax.broadcast_in_dim(slot, wide, [1]),
                    lax.broadcast_in_dim(oldest, wide, [0]),
                    lax.broadcast_in_dim(newest, wide, [0]),
                    head_dim**-0.5,
                )
                largest = plgpu.load(state_smem.at[0, tile], layout=down)
                total = plgpu.load(state_smem.at[1, tile], layout=down)
                now = jnp.maximum(largest, jnp.max(logits, axis=1))
                mass = jnp.exp2(logits - lax.broadcast_in_dim(now, wide, [0]))
                state_smem[0, tile] = now
                state_smem[1, tile] = total * jnp.exp2(largest - now) + jnp.sum(mass, axis=1)

        plgpu.emit_pipeline(
            step,
            grid=(per_part,),
            in_specs=[
                plgpu.BlockSpec(
                    (block, head_dim), lambda i: (part * per_part + i, 0), transforms=transforms
                ),
                plgpu.BlockSpec((block,), lambda i: (part * per_part + i,)),
            ],
            max_concurrent_steps=steps,
        )(key_gmem.at[head], held_gmem.at[head])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(state_smem, out_gmem.at[head, part])
        plgpu.wait_smem_to_gmem(0)

    found = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((heads, parts, 2, tiles, ROW_TILE), jnp.float32),
        scratch_types=[
            plgpu.SMEM((tiles, ROW_TILE, head_dim), keys.dtype, transforms=transforms),
            plgpu.SMEM(bounds.shape[1:], jnp.int32),
            plgpu.SMEM((2, tiles, ROW_TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=tiles + 1),
        ],
        grid=(parts, heads),
        grid_names=("part", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=gpu_interpret(),
        kernel_name="window_normalisers",
    )(queries, bounds, keys, held)
    found = found.reshape(heads, parts, 2, tiles * ROW_TILE)[..., :count]
    return found[:, :, 0], found[:, :, 1]


def reductions(
    rows: Rows,
    chunk: int,
    keys: Float[Array, "BK S D"],
    held: Int[Array, "BK P"],
    kv_heads: int,
    layout: tuple[int, int, int, int],
    offset: Float[Array, "BK R"],
    shares: Float[Array, "B C R"],
    reduce: Reduce,
    *,
    over_chunks: Combine,
    over_heads: Combine | None,
    kinds: int,
) -> Float[Array, "BK N P"]:
    """Reduced weights exp2(logit - offset), slots in the rows of the matrix product."""
    block, steps, per_part, parts = layout
    heads, _, head_dim = keys.shape
    groups, width = rows.groups, rows.width
    per_head = width // chunk
    chunks = groups * per_head
    # The heads of a group ask at the same positions, with the same shares.
    bounds = jnp.stack([rows.oldest[:, :width], rows.newest[:, :width]], axis=1)
    bounds = bounds.reshape(-1, 2, per_head, chunk)
    shares = shares[..., :width].reshape(*shares.shape[:2], per_head, chunk)
    offset = offset.reshape(heads, chunks, chunk)
    transforms = swizzled(head_dim, keys.dtype)
    outputs = kinds * (groups if over_heads is None else 1)

    def kernel(
        query_gmem: Any,
        bound_gmem: Any,
        share_gmem: Any,
        offset_gmem: Any,
        key_gmem: Any,
        held_gmem: Any,
        out_gmem: Any,
        query_smem: Any,
        bound_smem: Any,
        share_smem: Any,
        offset_smem: Any,
        out_smem: Any,
        arrived: Any,
    ) -> None:
        head, part = lax.axis_index("head"), lax.axis_index("part")
        for at in range(chunks):
            piece = query_gmem.at[head, pl.ds(at * chunk, chunk)]
            plgpu.copy_gmem_to_smem(piece, query_smem.at[at], arrived)
        plgpu.copy_gmem_to_smem(bound_gmem.at[lax.div(head, kv_heads)], bound_smem, arrived)
        plgpu.copy_gmem_to_smem(share_gmem.at[lax.div(head, kv_heads)], share_smem, arrived)
        plgpu.copy_gmem_to_smem(offset_gmem.at[head], offset_smem, arrived)
        plgpu.barrier_wait(arrived)
        wide = (block, chunk)

        def across(ref: Any) -> Array:
            row = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0))
            return lax.broadcast_in_dim(row, wide, [1])

        def step(indices: Any, key_smem: Any, held_smem: Any) -> None:
            buffer = lax.rem(indices[0], 2)
            # The results of the step before the last have been read.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            slot = plgpu.load(held_smem, layout=plgpu.Layout.WGMMA.reduce(1))
            slot = lax.broadcast_in_dim(slot, wide, [0])

            def of_chunk(group: Array, at: int) -> Sequence[Array]:
                products = product(key_smem, query_smem.at[group * per_head + at])
                oldest, newest = across(bound_smem.at[0, at]), across(bound_smem.at[1, at])
                logits = _logits(products, slot, oldest, newest, head_dim**-0.5)
                logs = logits - across(offset_smem.at[group * per_head + at])
                own = [across(share_smem.at[kind, at]) for kind in range(shares.shape[1])]
                # Where nothing is seen, 0 x a large number is still 0.
                return reduce(jnp.exp2(logs), logs * math.log(2.0), own)

            def of_head(group: Array) -> Sequence[Array]:
                found = [of_chunk(group, at) for at in range(per_head)]
                return fold(lambda a, b: list(map(over_chunks, a, b)), found)

            # A loop, not unrolled: the compiler would move every head's offsets to the front.
            if over_heads is None:

                @pl.loop(0, groups)
                def _each_head(group: Array) -> None:
                    for kind, result in enumerate(of_head(group)):
                        out_smem[buffer, kind * groups + group] = result

            else:

                def add_head(group: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
                    return tuple(map(over_heads, carry, of_head(group)))

                # Weighted sums may be negative, so that no maximum starts at 0.
                start = -jnp.inf if over_heads is jnp.maximum else 0.0
                nothing = plgpu.layout_cast(
                    jnp.full((block,), start, jnp.float32), plgpu.Layout.WGMMA.reduce(1)
                )
                results = lax.fori_loop(0, groups, add_head, (nothing,) * kinds)
                for kind, result in enumerate(results):
                    out_smem[buffer, kind] = result

            plgpu.commit_smem()
            start = (part * per_part + indices[0]) * block
            plgpu.copy_smem_to_gmem(out_smem.at[buffer], out_gmem.at[head, :, pl.ds(start, block)])

        plgpu.emit_pipeline(
            step,
            grid=(per_part,),
            in_specs=[
                plgpu.BlockSpec(
                    (block, head_dim),
                    lambda i: (part * per_part + i, 0),
                    transforms=transforms,
                ),
                plgpu.BlockSpec((block,), lambda i: (part * per_part + i,)),
            ],
            max_concurrent_steps=steps,
        )(key_gmem.at[head], held_gmem.at[head])
        plgpu.wait_smem_to_gmem(0)

    out: Array = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((heads, outputs, held.shape[1]), jnp.float32),
        scratch_types=[
            plgpu.SMEM((chunks, chunk, head_dim), keys.dtype, transforms=transforms),
            plgpu.SMEM(bounds.shape[1:], jnp.int32),
            plgpu.SMEM(shares.shape[1:], jnp.float32),
            plgpu.SMEM(offset.shape[1:], jnp.float32),
            plgpu.SMEM((2, outputs, block), jnp.float32),
            plgpu.Barrier(num_arrivals=chunks + 3),
        ],
        grid=(parts, heads),
        grid_names=("part", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=gpu_interpret(),
        kernel_name="window_reductions",
    )(rows.queries, bounds, shares, offset, keys, held)
    return out
