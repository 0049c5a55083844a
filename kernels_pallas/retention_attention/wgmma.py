"""Products and logits of tiles in the registers of a warpgroup, for the Hopper kernels.

A factor comes in parts, float32 as two halves in bfloat16: they are a list of arrays in registers,
or the first axis of an array in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import halves, lowering
from kernels_pallas.warpgroup import BY_COLUMN, BY_ROW, along_columns, along_rows, iota


def shared(shape: tuple[int, ...], dtype: Any, tokens: int = 64) -> Any:
    """Rows in shared memory, as they lie there for TMA and wgmma.

    A product whose sum goes over rows takes as many at a time as a swizzle holds 16-bit numbers,
    so that these may be at most `tokens`.
    """
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = 128 if tokens >= 64 and shape[-1] * bits % 1024 == 0 else 64
    pallas: Any = plgpu  # whose annotations make these classes abstract
    transforms = (
        pallas.TilingTransform((8, 8 * swizzle // bits)),
        pallas.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def as_parts(array: Array) -> Array:
    """An array in parts, which are its first axis; outside of kernels."""
    return jnp.stack(halves.halves(array))


def fetch(array: Any, at: tuple[Any, ...], tile: Any, arrived: Any) -> None:
    """Starts the copies of a tile in parts, one for each."""
    for part in range(tile.shape[0]):
        plgpu.copy_gmem_to_smem(array.at[(part, *at)], tile.at[part], arrived)


def split(tile: Array, dtype: Any) -> list[Array]:
    """A float32 tile in registers in the parts of a tensor of type `dtype`."""
    if halves.count(dtype) == 1:
        return [tile.astype(dtype)]
    high = tile.astype(jnp.bfloat16)
    return [high, (tile - high.astype(jnp.float32)).astype(jnp.bfloat16)]


def transposed(tile: Any) -> Any:
    """A tile in memory whose first axis are its parts."""
    return tile.transpose((0, 2, 1))


def accumulate(*products: tuple[Array, Any, Any]) -> tuple[Array, ...]:
    """c + a b of each (c, a, b), issued together; a in registers or memory."""
    if lowering.gpu_interpret() is not False:
        # The simulator knows no accumulator with a start and no operand in registers.
        return tuple(
            c
            + sum(
                lax.dot(x[...], y[...], preferred_element_type=jnp.float32)
                for x, y in _factors(a, b)
            )
            for c, a, b in products
        )

    def issue(sums: tuple[Any, ...]) -> None:
        for accumulator, (_, a, b) in zip(sums, products, strict=True):
            for x, y in _factors(a, b):
                plgpu.wgmma(accumulator, x, y)

    return pl.run_state(issue)(tuple(plgpu.ACC.init(c) for c, _, _ in products))


def product(a: Any, b: Any, meanwhile: Callable[[], None] = lambda: None) -> Array:
    """a b in float32, both in memory; `meanwhile` runs behind its start."""

    def issue(accumulator: Any) -> Array:
        for x, y in _factors(a, b):
            plgpu.wgmma(accumulator, x, y)
        meanwhile()
        return accumulator[...]

    return pl.run_scoped(issue, plgpu.ACC((a.shape[1], b.shape[2]), jnp.float32))


def _factors(a: Any, b: Any) -> list[tuple[Any, Any]]:
    """What is multiplied and added up for a b."""
    pairs = halves.products(b.shape[0])
    return [(a[x] if isinstance(a, list) else a.at[x], b.at[y]) for x, y in pairs]


def logits(
    products: Float[Array, "Q S"],
    *,
    scale: float,
    full: Bool[Array, ""],
    offset: Int[Array, ""],
    window: Int[Array, ""],
    asking: Any,
    held: Any,
    columns: Any | None,
) -> Float[Array, "Q S"]:
    """Logits in base 2 of a tile's products q k, unseen pairs at -inf.

    Args:
      scale: of the products, to base 2.
      full: every pair is visible, and every age at least 0.
      offset: the first query's age at the first key.
      asking, held: segments of queries and keys in memory.
      columns: the keys' `decay_columns` in memory; None for no decay.
    """
    shape = products.shape

    def of_keys(memory: Any) -> Array:
        return along_columns(plgpu.load(memory, layout=BY_COLUMN), shape)

    def whole(products: Array) -> Array:
        if columns is None:
            return products * scale
        behind = (iota(shape, 0) + offset).astype(jnp.float32) * of_keys(columns.at[0])
        return products * scale + (behind + of_keys(columns.at[1]))

    def masked(products: Array) -> Array:
        age = iota(shape, 0) + offset - iota(shape, 1)
        mine = along_rows(plgpu.load(asking, layout=BY_ROW), shape)
        seen = (of_keys(held) == mine) & (mine >= 0) & (age >= 0) & (age < window)
        found = products * scale
        if columns is not None:
            found = found + age.astype(jnp.float32) * of_keys(columns.at[0])
        return jnp.where(seen, found, -jnp.inf)

    return lax.cond(full, whole, masked, products)
