"""What a block of threads of decode attention keeps in shared memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from kernels_pallas.ragged_decode.mosaic_gpu_cache import BLOCK

ROWS = 64  # of one wgmma
_SHARED_BYTES = 227 * 1024  # of an SM


@dataclasses.dataclass(frozen=True)
class Shared:
    """What one block of threads works with."""

    size: int
    dtype: Any
    tile_rows: int
    with_logits: bool

    @property
    def parts(self) -> int:
        return 2 if self.dtype == jnp.float32 else 1

    @property
    def operand(self) -> Any:
        """What wgmma multiplies."""
        return jnp.dtype(jnp.bfloat16 if self.parts == 2 else self.dtype)

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        return ((0, 0),) if self.parts == 1 else ((0, 0), (0, 1), (1, 0))

    def split(self, x: Array) -> list[Array]:
        """The parts whose sum is x."""
        first = x.astype(self.operand)
        if self.parts == 1:
            return [first]
        return [first, (x - first.astype(jnp.float32)).astype(self.operand)]

    @property
    def stages(self) -> int:
        """Blocks in flight: two on half an SM, else what fits a whole one, up to four."""
        element = jnp.dtype(self.dtype).itemsize
        stage = 2 * BLOCK * self.size * element
        fixed = self.parts * 2 * ROWS * (self.size + BLOCK) + 8 * 1024
        fixed += self.with_logits * 4 * ROWS * BLOCK
        fixed += (self.parts == 2) * 4 * BLOCK * self.size
        half = (_SHARED_BYTES // 2 - fixed) // stage
        return max(1, min(4, half if half >= 2 else (_SHARED_BYTES - fixed) // stage))

    @property
    def swizzle(self) -> int:
        """Of wgmma's operands."""
        return _swizzle(self.size * self.operand.itemsize)

    @property
    def columns(self) -> int:
        """Of V and of the output that are multiplied at a time: a thread has 255 registers."""
        return 64 if self.size % 64 == 0 else self.size

    def tiled(self, *shape: int, dtype: Any, swizzle: int = 0) -> Any:
        """Shared memory whose last axis lies in swizzled tiles of 8 rows, as wgmma reads them."""
        element = jnp.dtype(dtype).itemsize
        swizzle = swizzle or _swizzle(shape[-1] * element)
        tiles = (plgpu.TilingTransform((8, swizzle // element)), plgpu.SwizzleTransform(swizzle))
        return plgpu.SMEM(shape, dtype, transforms=tiles)

    def scratch(self, copies: int, table: int) -> list[Any]:
        """With `copies` to a block, and `table` numbers that say where a chunk's begin."""
        size, stages, operand = self.size, self.stages, self.operand
        swizzle = self.swizzle
        fetched = self.tiled(stages, BLOCK, size, dtype=self.dtype)
        # What leaves at the end lies where blocks came in before.
        shared = plgpu.RefUnion([fetched, fetched], plgpu.SMEM((ROWS, size), jnp.float32))
        optional = [
            self.tiled(2, BLOCK, size, dtype=operand, swizzle=swizzle) if self.parts == 2 else None,
            self.tiled(ROWS, BLOCK, dtype=jnp.float32) if self.with_logits else None,
            plgpu.SMEM((table,), jnp.int32) if table else None,
        ]
        return [
            self.tiled(self.parts, ROWS, size, dtype=operand, swizzle=swizzle),
            shared,
            plgpu.SMEM((stages, BLOCK), jnp.int32),
            self.tiled(self.parts, ROWS, BLOCK, dtype=operand, swizzle=swizzle),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(num_arrivals=self.parts),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            optional,
        ]


def _swizzle(row_bytes: int) -> int:
    return next(swizzle for swizzle in (128, 64, 32) if row_bytes % swizzle == 0)
