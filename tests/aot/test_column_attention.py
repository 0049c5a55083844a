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
    tile = 4 * shape.heads * BLOCK**2
    assert compiled.spilled_bytes == 0
    if PLATFORM == "gpu" and statistic == "sum":
        assert "mosaic_gpu" in compiled.text
        assert compiled.temporary_bytes <= 2 * results
    else:
        assert compiled.temporary_bytes <= 4 * results + 4 * tile


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_batches_compile_in_both_types(compile_for, dtype):
    shape = SHAPES["prompt_4k"]
    function = partial(column_attention, statistic="max", window=1024)
    compiled = compile_for(function, *specs(shape, dtype))
    results = 4 * shape.batch * shape.heads * shape.tokens
    tile = 4 * shape.heads * BLOCK**2
    assert compiled.spilled_bytes == 0
    # For TPU XLA makes bfloat16 parts of float32 operands, all of them ahead of the loop.
    rounded = compiled.argument_bytes // 2 if dtype == jnp.float32 else 0
    assert compiled.temporary_bytes <= 4 * results + 4 * tile + rounded


@pytest.mark.skipif(PLATFORM != "gpu", reason="a kernel on GPU only")
@pytest.mark.parametrize(("head_dim", "dtype"), [(80, jnp.float32), (64, jnp.bfloat16)])
def test_small_heads_compile_to_the_kernel(compile_for, head_dim, dtype):
    shape = dataclasses.replace(SHAPES["prompt_32k"], head_dim=head_dim)
    compiled = compile_for(column_attention, *specs(shape, dtype))
    assert "mosaic_gpu" in compiled.text
    assert compiled.spilled_bytes == 0
