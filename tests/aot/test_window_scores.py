"""Window scores compiled for each target: the kernel is there, and no [H, W, S] array is."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.window_scores import window_moments, window_scores
from kernels_pallas.window_scores.shapes import SHAPES, Shape
from tests.aot.conftest import PLATFORM

KERNEL = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}.get(PLATFORM, "")


def specs(shape: Shape, dtype):
    batch, slots = shape.batch, shape.slots
    return (
        jax.ShapeDtypeStruct((batch, shape.heads, shape.window, shape.head_dim), dtype),
        jax.ShapeDtypeStruct((batch, shape.kv_heads, slots, shape.head_dim), dtype),
        jax.ShapeDtypeStruct((batch, shape.window), jnp.int32),
        jax.ShapeDtypeStruct((batch, shape.kv_heads, slots), jnp.int32),
    )


def check(compiled, shape: Shape, outputs_per_kv_head: int, key_bytes: int = 2):
    assert KERNEL in compiled.text
    assert compiled.spilled_bytes == 0
    # Positions and scores may be laid out anew; the logits would be 4 G W times as many bytes.
    entries = shape.batch * shape.kv_heads * shape.slots
    allowed = 4 * entries * (2 + outputs_per_kv_head) + 2**21
    if PLATFORM == "gpu" and shape.slots % 8:
        allowed += key_bytes * (entries + 8 * shape.batch * shape.kv_heads) * shape.head_dim
    assert compiled.temporary_bytes <= allowed


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", SHAPES)
def test_scores_compile_to_the_kernel(compile_for, name, dtype):
    compiled = compile_for(window_scores, *specs(SHAPES[name], dtype))
    check(compiled, SHAPES[name], 1, jnp.dtype(dtype).itemsize)


@pytest.mark.parametrize("reduction", [("max", "max"), ("sum", None), ("mean", "mean")])
def test_every_reduction_compiles(compile_for, reduction):
    shape = dataclasses.replace(SHAPES["prompt_32k"], head_dim=80, kv_heads=4)
    over_queries, over_group = reduction
    function = partial(window_scores, over_queries=over_queries, over_group=over_group, window=4096)
    compiled = compile_for(function, *specs(shape, jnp.bfloat16))
    check(compiled, shape, 8 if over_group is None else 1)


@pytest.mark.parametrize("size", [64, 256])
def test_many_results_of_wide_groups_fit(compile_for, size):
    """A group of eight with three results per head, beside blocks of keys."""
    shape = dataclasses.replace(SHAPES["prompt_32k"], heads=64, head_dim=size)
    check(compile_for(window_moments, *specs(shape, jnp.bfloat16)), shape, 24)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_moments_compile_to_the_kernel(compile_for, dtype):
    shape = SHAPES["prompt_128k"]
    check(compile_for(window_moments, *specs(shape, dtype)), shape, 12)
