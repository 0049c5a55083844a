"""Products and logits of tiles in the registers of a warpgroup, for the Hopper kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import lowering

TILE = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = TILE.reduce(1), TILE.reduce(0)


def transforms(size: int) -> tuple[Any, ...]:
    """How rows of `size` 16-bit numbers lie in shared memory for TMA and wgmma."""
    swizzle = 128 if size % 64 == 0 else 64
    pallas: Any = plgpu  # whose annotations make these classes abstract
    return pallas.TilingTransform((8, swizzle // 2)), pallas.SwizzleTransform(swizzle)


def accumulate(*products: tuple[Array | None, Any, Any]) -> tuple[Array, ...]:
    """c + a b of each (c, a, b), issued together; a in registers or memory, no c for 0."""
    if lowering.gpu_interpret() is not False:
        # The simulator knows no accumulator with a start and no operand in registers.
        return tuple(
            product(a, b)
            if c is None
            else c + lax.dot(a[...], b[...], preferred_element_type=jnp.float32)
            for c, a, b in products
        )

    def issue(sums: tuple[Any, ...]) -> None:
        for accumulator, (_, a, b) in zip(sums, products, strict=True):
            plgpu.wgmma(accumulator, a, b)

    starts = tuple(
        filled((a.shape[0], b.shape[1]), 0.0) if c is None else c for c, a, b in products
    )
    return pl.run_state(issue)(tuple(plgpu.ACC.init(c) for c in starts))


def product(a: Any, b: Any, meanwhile: Callable[[], None] = lambda: None) -> Array:
    """a b in float32, both 16-bit; `meanwhile` runs behind its start."""

    def issue(accumulator: Any) -> Array:
        plgpu.wgmma(accumulator, a, b)
        meanwhile()
        return accumulator[...]

    return pl.run_scoped(issue, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def filled(shape: tuple[int, ...], value: float, layout: Any = TILE) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def along_rows(row: Array, shape: tuple[int, ...]) -> Array:
    """One number per row, for the whole row."""
    return lax.broadcast_in_dim(row, shape, [0])


def along_columns(column: Array, shape: tuple[int, ...]) -> Array:
    """One number per column, for the whole column."""
    return lax.broadcast_in_dim(column, shape, [1])


def iota(shape: tuple[int, ...], axis: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE)


def drain(steps: Array, stages: int, free: Any) -> None:
    """Waits until the last tiles are used: a block leaves no barrier behind that may yet turn."""

    @pl.loop(jnp.maximum(steps - stages, 0), steps)
    def wait(step: Array) -> None:
        plgpu.barrier_wait(free.at[lax.rem(step, jnp.int32(stages))])


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
