"""Over two by two devices each runs the kernels on its rows and heads; nothing is exchanged."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from benchmarks.hlo import traffic
from kernels_pallas.gather_compact import compact
from kernels_pallas.ragged_decode import decode_attention
from kernels_pallas.removal_error import removal_error
from kernels_pallas.retention_attention import retention_attention
from kernels_pallas.select import keep_mask, kept_indices
from kernels_pallas.window_scores import window_scores
from tests.aot.conftest import PLATFORM

KERNEL = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}[PLATFORM]
ROWS, HEADS = PartitionSpec("data"), PartitionSpec("data", "tensor")
B, K, G, D = 4, 8, 4, 128


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def integers(*shape):
    return array(*shape, dtype=jnp.int32)


def test_decode_attention(compile_for):
    queries, cache = array(B, K * G, 1, D), array(B, K, 1152, D)
    numbers = (integers(B, 1), integers(B, K, 1152), integers(B, K))
    over = (HEADS, HEADS, HEADS, ROWS, HEADS, HEADS)
    compiled = compile_for(decode_attention, queries, cache, cache, *numbers, over=over)
    assert KERNEL in compiled.text
    assert not traffic(compiled.text).count
    assert compiled.argument_bytes < 1.2 * 2 * cache.size * 2 / 4


def test_a_donated_cache_is_compacted_where_it_lies(compile_for):
    def run(cache, indices, lengths):
        return compact(cache, indices, lengths)

    cache = (array(4, B, K, 1152, D),) * 2
    numbers = (integers(4, B, K, 1152), integers(4, B, K))
    everywhere = PartitionSpec(None, "data", "tensor")
    compiled = compile_for(run, cache, *numbers, donate=(0,), over=[everywhere] * 4)
    size = 2 * cache[0].size * 2 / 4
    assert KERNEL in compiled.text
    assert not traffic(compiled.text).count
    assert compiled.aliased_bytes >= size
    assert compiled.temporary_bytes <= 0.1 * size


def test_a_layer_is_scored_and_selected(compile_for):
    def run(queries, keys, asked, positions, budgets):
        scores = window_scores(queries, keys, asked, positions)
        keep = keep_mask(scores, jnp.zeros_like(positions), positions >= 0, budgets)
        return kept_indices(keep, 1024)

    specs = (array(B, K * G, 32, D), array(B, K, 4096, D), integers(B, 32), integers(B, K, 4096))
    over = (HEADS, HEADS, ROWS, HEADS, HEADS)
    compiled = compile_for(run, *specs, integers(B, K), over=over)
    assert KERNEL in compiled.text
    assert not traffic(compiled.text).count


def test_removal_errors(compile_for):
    numbers = partial(array, dtype=jnp.float32)
    specs = (
        numbers(B, K, G, 4096),
        array(B, K, 4096, D),
        integers(B, K, 4096),
        integers(B),
        numbers(K, G * D, G * D),
    )
    over = (HEADS, HEADS, HEADS, ROWS, PartitionSpec("tensor"))
    compiled = compile_for(partial(removal_error, joint=True), *specs, over=over)
    assert KERNEL in compiled.text
    assert not traffic(compiled.text).count


@pytest.mark.parametrize("tokens", [1024])
def test_training_attention_and_its_gradients(compile_for, tokens):
    def loss(segments, *tensors):
        return jnp.sum(retention_attention(*tensors, segments).astype(jnp.float32))

    def run(queries, keys, values, log_beta, segments):
        step = jax.grad(partial(loss, segments), argnums=(0, 1, 2, 3))
        return step(queries, keys, values, log_beta)

    specs = (
        array(B, K * G, tokens, D),
        array(B, K, tokens, D),
        array(B, K, tokens, D),
        array(B, K, tokens, dtype=jnp.float32),
        integers(B, tokens),
    )
    compiled = compile_for(run, *specs, over=(HEADS, HEADS, HEADS, HEADS, ROWS))
    assert compiled.text.count(KERNEL) >= 3
    assert not traffic(compiled.text).count
