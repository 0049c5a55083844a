"""Products on Hopper of a float32 operand in registers, cut into two bfloat16 like the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from kernels_pallas import lowering


def add_products(total: Array, parts: Iterable[tuple[Array, Any, Any]]) -> Array:
    """total + sum of left (high + low) over `parts`, but for the product of two low halves."""
    if lowering.gpu_interpret() is not False:
        # The simulator knows no accumulator with a start and no operand in registers.
        for left, high, low in parts:
            first, second = _halves(left)
            for half, right in ((first, high), (first, low), (second, high)):
                total = total + lax.dot(half, right[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # for what the tensor cores would have read
        return total

    def issue(accumulator: Any) -> None:
        for left, high, low in parts:
            first, second = _halves(left)
            plgpu.wgmma(accumulator, first, high)
            plgpu.wgmma(accumulator, first, low)
            plgpu.wgmma(accumulator, second, high)

    return pl.run_state(issue)(plgpu.ACC.init(total))


def _halves(array: Array) -> tuple[Array, Array]:
    """float32 as a sum of two bfloat16, rounded by its bits: casts there and back are left out."""
    bits = lax.bitcast_convert_type(array, jnp.int32)
    bits = (bits + jnp.int32(0x8000)) & jnp.int32(-0x10000)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high.astype(jnp.bfloat16), (array - high).astype(jnp.bfloat16)
