"""Tiles of a warpgroup of Hopper: how they lie in registers and in shared memory."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

TILE = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = TILE.reduce(1), TILE.reduce(0)


def swizzled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """How rows that are copied or multiplied `columns` at a time lie in shared memory."""
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * bits)
    pallas: Any = plgpu  # whose annotations make these classes abstract
    return pallas.TilingTransform((8, 8 * swizzle // bits)), pallas.SwizzleTransform(swizzle)


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
