"""A latent memory's products leave no array that grows with what is written."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import dispatch
from kernels_pallas.latent_memory import memory_read, memory_update
from kernels_pallas.latent_memory.shapes import SHAPES, MemoryShape

# XLA's products, whose memory does not depend on the generation.
pytestmark = pytest.mark.newest


def spec(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def state(shape: MemoryShape, per_head: bool):
    batch, heads, features = shape.batch, shape.kv_heads, shape.features
    if per_head:
        own = (batch, heads, features // heads)
        weights = spec(heads, shape.size, features // heads)
        return weights, spec(*own, shape.size), spec(*own)
    wide = heads * shape.size
    return spec(heads, shape.size, features), spec(batch, features, wide), spec(batch, features)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cut-of-128k", "aligned"),
        ("cut-of-128k", "per head"),
        ("cut-128-of-1152", "unaligned"),
    ],
)
def test_a_write_holds_one_block(compile_for, name, kind):
    shape = SHAPES[name]
    entries = (shape.batch, shape.kv_heads, shape.slots)
    given = [spec(*entries, shape.size, dtype=jnp.bfloat16)] * 2
    at = [spec(*entries, dtype=jnp.int32), spec(*entries, dtype=jnp.bool_), spec(shape.batch)]
    function = partial(memory_update, aligned=kind == "aligned")
    program = compile_for(function, *state(shape, kind == "per head"), *given, *at)
    assert dispatch.choices()["memory_update"].implementation == "blockwise"
    # Ranks of tokens are 4 bytes for every pair of an entry and a head, sorted and inverted.
    ranks = 64 * shape.slots * shape.kv_heads if kind == "unaligned" else 0
    block = 2048 * 4 * (2 * 2 * shape.kv_heads * shape.size + 4 * shape.features)
    assert program.temporary_bytes < block + 4 * program.output_bytes + ranks


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("name", ["cut-128-of-1152", "cut-of-128k", "batch-16"])
def test_a_read_copies_neither_memory_nor_weights(compile_for, name, per_head):
    shape = SHAPES[name]
    queries = spec(shape.batch, shape.heads, shape.queries, shape.size, dtype=jnp.bfloat16)
    weights, *held = state(shape, per_head)
    program = compile_for(memory_read, weights, *held, queries)
    per_token = 4 * shape.batch * shape.queries * (8 * shape.heads * shape.size + shape.features)
    assert program.temporary_bytes < 0.5 * program.argument_bytes + per_token
