"""Decode attention's kernels, compiled at the sizes they are for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import dispatch
from kernels_pallas.ragged_decode import decode_attention, decode_mass, paged_attention, paged_mass
from kernels_pallas.ragged_decode.shapes import SHAPES, DecodeShape

KERNEL = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}[dispatch.platform()]
both = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])


def specs(shape: DecodeShape, dtype, *, paged: bool, mass: bool):
    def ints(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.int32)

    rows = (shape.batch, shape.heads, shape.queries)
    queries = jax.ShapeDtypeStruct((*rows, shape.size), dtype)
    heads, asked = (shape.batch, shape.kv_heads), ints(shape.batch, shape.queries)
    if paged:
        pool = (shape.batch, shape.pool, shape.page)
        cache = jax.ShapeDtypeStruct((*pool, shape.size), dtype)
        at = [ints(*pool), ints(*heads, shape.pages_per_head), ints(*heads), asked]
    else:
        cache = jax.ShapeDtypeStruct((*heads, shape.slots, shape.size), dtype)
        at = [asked, ints(*heads, shape.slots), ints(*heads)]
    others = [jax.ShapeDtypeStruct(rows, jnp.float32)] if mass else []
    return queries, cache, cache, *at, *others


def check(compile_for, function, shape: DecodeShape, dtype, **kind):
    program = compile_for(function, *specs(shape, dtype, **kind))
    assert KERNEL in program.text
    assert program.spilled_bytes == 0
    # Chunks' partial results, positions and logits; nothing of the keys' and values' size.
    cache = 2 * shape.batch * shape.kv_heads * shape.slots * shape.size * jnp.dtype(dtype).itemsize
    rows = shape.batch * shape.heads * shape.queries * shape.size * 4
    # A TPU gathers pages of positions from rows of 128 lanes.
    pool = shape.batch * shape.pool * 128 * 4 if kind["paged"] else 0
    assert program.temporary_bytes < 0.5 * cache + 8 * rows + pool + 2**20


@both
@pytest.mark.parametrize("shape", SHAPES)
def test_padded_attention_is_one_kernel(compile_for, shape, dtype):
    check(compile_for, decode_attention, SHAPES[shape], dtype, paged=False, mass=False)


@both
@pytest.mark.parametrize("shape", ["budget-1024", "full-128k", "smollm2-135m"])
def test_paged_attention_is_one_kernel(compile_for, shape, dtype):
    check(compile_for, paged_attention, SHAPES[shape], dtype, paged=True, mass=False)


@both
@pytest.mark.parametrize("shape", ["budget-1024-batch-16", "full-32k"])
@pytest.mark.parametrize("paged", [False, True])
def test_the_mass_costs_one_kernel_and_no_second_pass(compile_for, shape, dtype, paged):
    function = paged_mass if paged else decode_mass
    check(compile_for, function, SHAPES[shape], dtype, paged=paged, mass=True)
    assert dispatch.choices()[function.__name__].implementation.startswith("mosaic")


@both
def test_the_mass_of_heads_with_an_odd_number_of_slots_is_one_kernel(compile_for, dtype):
    check(compile_for, decode_mass, DecodeShape(slots=1001), dtype, paged=False, mass=True)
    assert dispatch.choices()["decode_mass"].implementation.startswith("mosaic")
