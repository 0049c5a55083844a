"""Column attention compiled for each target: memory linear in the prompt, as XLA compiles it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.column_attention import column_attention
from kernels_pallas.column_attention.shapes import SHAPES, Shape

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
    assert compiled.temporary_bytes <= 4 * results + 5 * tile
    assert compiled.spilled_bytes == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_batches_compile_in_both_types(compile_for, dtype):
    shape = SHAPES["prompt_4k"]
    compiled = compile_for(column_attention, *specs(shape, dtype))
    results = 4 * shape.batch * shape.heads * shape.tokens
    tile = 4 * shape.batch * shape.heads * BLOCK**2
    assert compiled.temporary_bytes <= 4 * results + 5 * tile
