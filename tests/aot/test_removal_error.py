"""Removal errors compiled for each target: no array of H x W x S or of S x G D."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.removal_error import removal_error, restkv_scores
from kernels_pallas.removal_error.shapes import SHAPES
from tests.aot.conftest import PLATFORM


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", ["prompt_128k", "smollm2_8k"])
def test_scores_compile_with_temporaries_linear_in_the_slots(compile_for, name, dtype, joint):
    shape = SHAPES[name]
    batch, heads, kv_heads, slots = shape.batch, shape.heads, shape.kv_heads, shape.slots
    cached = jax.ShapeDtypeStruct((batch, kv_heads, slots, shape.head_dim), dtype)
    blocks, rows = (kv_heads, heads // kv_heads) if joint else (heads, 1)
    side = rows * shape.head_dim
    compiled = compile_for(
        partial(restkv_scores, joint=joint),
        jax.ShapeDtypeStruct((batch, heads, shape.window, shape.head_dim), dtype),
        cached,
        cached,
        jax.ShapeDtypeStruct((batch, shape.window), jnp.int32),
        jax.ShapeDtypeStruct((batch, kv_heads, slots), jnp.int32),
        jax.ShapeDtypeStruct((batch, shape.window), jnp.float32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        jax.ShapeDtypeStruct((blocks, side, side), jnp.float32),
    )
    assert compiled.spilled_bytes == 0
    # The weights, and positions and factors laid out anew.
    entries = 4 * batch * slots * (2 * heads + 4 * kv_heads)
    most = entries + 8 * blocks * side**2 + 2**21
    if PLATFORM == "tpu":
        assert compiled.text.count("tpu_custom_call") >= 2
    else:
        assert compiled.text.count('custom_call_target="mosaic_gpu') >= 4
        if slots % 8:  # keys and values are copied
            most += 2 * batch * kv_heads * slots * shape.head_dim * jnp.dtype(dtype).itemsize
    assert compiled.temporary_bytes <= most


@pytest.mark.skipif(PLATFORM != "gpu", reason="what the GPU kernel takes")
@pytest.mark.newest
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("group", "size"), [(1, 128), (8, 128), (16, 128), (1, 80), (3, 16)])
def test_other_groups_and_head_sizes_compile_to_the_kernels(compile_for, group, size, dtype, joint):
    batch, kv_heads, slots = 2, 2, 1000
    blocks, side = (kv_heads, group * size) if joint else (kv_heads * group, size)
    compiled = compile_for(
        partial(removal_error, joint=joint, tau=0.5, implementation="mosaic_gpu"),
        jax.ShapeDtypeStruct((batch, kv_heads, group, slots), jnp.float32),
        jax.ShapeDtypeStruct((batch, kv_heads, slots, size), dtype),
        jax.ShapeDtypeStruct((batch, kv_heads, slots), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        jax.ShapeDtypeStruct((blocks, side, side), jnp.float32),
    )
    assert compiled.spilled_bytes == 0
    assert compiled.text.count('custom_call_target="mosaic_gpu') == 2
