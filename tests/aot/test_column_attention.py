"""Column attention compiled for each target: memory linear in the prompt.

On TPU, and for the variance, these are XLA's blocks; sums on GPU are a kernel.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.column_attention import column_attention
from kernels_pallas.column_attention.shapes import SHAPES, Shape
from tests.aot.conftest import PLATFORM

BLOCK = 256


def specs(shape: Shape, dtype):
    batch, tokens = shape.batch, shape.tokens
    return (
        jax.ShapeDtypeStruct((batch, shape.heads, tokens, shape.head_dim), dtype),
        jax.ShapeDtypeStruct((batch, shape.heads, tokens), jnp.float32),
        jax.ShapeDtypeStruct((batch, shape.kv_heads, tokens, shape.head_dim), dtype),
        jax.ShapeDtypeStruct((batch, tokens), jnp.int32),
        jax.ShapeDtypeStruct((batch, shape.kv_heads, tokens), jnp.int32),
    )


@pytest.mark.parametrize("statistic", ["sum", "variance"])
@pytest.mark.parametrize("name", ["prompt_64k", "prompt_128k"])
def test_temporaries_are_tiles_and_results(compile_for, name, statistic):
    shape = SHAPES[name]
    function = partial(column_attention, statistic=statistic)
    compiled = compile_for(function, *specs(shape, jnp.bfloat16))
    results = 4 * shape.batch * shape.heads * shape.tokens
    tile = 4 * shape.batch * shape.heads * BLOCK**2
    assert compiled.spilled_bytes == 0
    assert compiled.temporary_bytes <= 4 * results + (0 if PLATFORM == "gpu" else 5 * tile)
    assert compiled.spilled_bytes == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_batches_of_small_heads_compile_in_both_types(compile_for, dtype):
    shape = dataclasses.replace(SHAPES["prompt_4k"], head_dim=80)
    function = partial(column_attention, statistic="max", window=1024)
    compiled = compile_for(function, *specs(shape, dtype))
    results = 4 * shape.batch * shape.heads * shape.tokens
    tile = 4 * shape.batch * shape.heads * BLOCK**2
    assert compiled.spilled_bytes == 0
    assert compiled.temporary_bytes <= 4 * results + (0 if PLATFORM == "gpu" else 5 * tile)
