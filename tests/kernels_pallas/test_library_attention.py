"""Maintained kernels behind our signature: the same attention, or a sentence why not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.attention import library, reference


def prompt(length: int = 136):
    keys = jax.random.split(jax.random.key(0), 3)
    queries = jax.random.normal(keys[0], (1, 4, length, 64))
    return queries, *(jax.random.normal(key, (1, 2, length, 64)) for key in keys[1:])


def test_splash_attention_is_the_reference_on_a_length_between_its_blocks():
    queries, keys, values = prompt()
    out, lse = library.splash(queries, keys, values, interpret=True)
    positions = jnp.arange(136, dtype=jnp.int32)[None]
    slots = jnp.broadcast_to(positions[:, None], (1, 2, 136))
    wanted, wanted_lse = reference.attention(queries, keys, values, positions, slots)
    np.testing.assert_allclose(out, wanted, atol=2e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-5)


def test_splash_attention_of_a_part_to_an_earlier_one_sees_all_of_it():
    queries, keys, values = prompt(128)
    out, lse = library.splash(queries, keys, values, causal=False, interpret=True)
    later = jnp.full((1, 128), 128, jnp.int32)
    slots = jnp.broadcast_to(jnp.arange(128, dtype=jnp.int32), (1, 2, 128))
    wanted, wanted_lse = reference.attention(queries, keys, values, later, slots)
    np.testing.assert_allclose(out, wanted, atol=2e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-5)
    with pytest.raises(NotImplementedError, match="not 136"):
        library.splash(*prompt(136), causal=False, interpret=True)


def test_splash_attention_lowers_for_tpu():
    shapes = [jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in prompt()]
    lowered = jax.jit(library.splash).trace(*shapes).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


def test_cudnn_attention_refuses_float32_by_name():
    with pytest.raises(NotImplementedError, match="not float32"):
        library.cudnn(*prompt())
