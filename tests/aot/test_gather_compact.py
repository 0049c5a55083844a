"""Compaction compiles for every target, in place and without a second cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from kernels_pallas.gather_compact import compact
from kernels_pallas.gather_compact.shapes import SHAPES
from tests.aot.conftest import PLATFORM

KERNEL = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}[PLATFORM]


def specs_of(shape, dtype):
    heads = shape.heads
    if shape.page is None:
        array = jax.ShapeDtypeStruct((*heads, shape.slots, shape.head_dim), dtype)
    else:
        pages = shape.layers * shape.kv_heads * (shape.kept // shape.page + 1)
        array = jax.ShapeDtypeStruct((shape.batch, pages, shape.page, shape.head_dim), dtype)
    numbers = [
        jax.ShapeDtypeStruct((*heads, shape.slots), jnp.int32),
        jax.ShapeDtypeStruct(heads, jnp.int32),
        jax.ShapeDtypeStruct(heads, jnp.int32),
    ]
    if shape.page is not None:
        table = (*heads, shape.slots // shape.page)
        numbers.append(jax.ShapeDtypeStruct(table, jnp.int32))
    return array, numbers


def run(keys, values, indices, lengths, held, table=None):
    return compact((keys, values), indices, lengths, held=held, table=table)


@pytest.mark.parametrize("name", SHAPES)
def test_a_donated_cache_is_compacted_where_it_lies(compile_for, name):
    array, numbers = specs_of(SHAPES[name], jnp.bfloat16)
    compiled = compile_for(run, array, array, *numbers, donate=(0, 1))
    size = 2 * array.size * 2
    assert KERNEL in compiled.text
    assert compiled.aliased_bytes >= size
    assert compiled.temporary_bytes <= 0.05 * size  # the indices, padded
    assert compiled.spilled_bytes == 0


@pytest.mark.parametrize(
    ("slots", "size", "dtype"),
    [(1152, 128, jnp.float32), (1151, 128, jnp.bfloat16), (1152, 80, jnp.bfloat16),
     (1152, 64, jnp.float32)],
)  # fmt: skip
def test_other_shapes_are_served(compile_for, slots, size, dtype):
    heads = (32, 1, 8)
    array = jax.ShapeDtypeStruct((*heads, slots, size), dtype)
    numbers = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((*heads, slots), heads, heads)]
    compiled = compile_for(run, array, array, *numbers, donate=(0, 1))
    assert KERNEL in compiled.text
    assert compiled.spilled_bytes == 0
    if PLATFORM == "gpu" or (size == 128 and slots % 8 == 0):
        # A TPU program keeps other shapes in another layout and copies them for the kernel.
        assert compiled.temporary_bytes <= 0.05 * 2 * array.size * array.dtype.itemsize


def test_a_cut_in_place_of_an_append_copies_nothing(compile_for):
    array, numbers = specs_of(SHAPES["decode"], jnp.bfloat16)

    def extend(keys, values, indices, lengths, held):
        def cut():
            return run(keys, values, indices, lengths, held)

        def append():
            return tuple(a.at[:, :, :, 5].set(jnp.ones((), a.dtype)) for a in (keys, values))

        return lax.cond(jnp.any(held > 1024), cut, append)

    compiled = compile_for(extend, array, array, *numbers, donate=(0, 1))
    assert compiled.aliased_bytes >= 2 * array.size * 2
    assert compiled.temporary_bytes <= 0.05 * 2 * array.size * 2
