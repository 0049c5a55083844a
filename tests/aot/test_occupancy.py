"""Soft occupancy, which is left to XLA, compiles for the devices in linear memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import dispatch
from kernels_pallas.occupancy import occupancy, occupancy_at

pytestmark = pytest.mark.newest

HEADS = 8  # Llama-3.1-8B's KV heads


def whole(log_beta, segments):
    found, pull = jax.vjp(lambda log_beta: occupancy(log_beta, segments), log_beta)
    return found, pull(found)


def sampled(log_beta, segments, at):
    found, pull = jax.vjp(lambda log_beta: occupancy_at(log_beta, segments, at), log_beta)
    return found, pull(found)


def specs(length, samples=None, batch=1):
    rows = [length] if samples is None else [length, samples]
    return (
        jax.ShapeDtypeStruct((batch, HEADS, length), jnp.float32),
        *(jax.ShapeDtypeStruct((batch, count), jnp.int32) for count in rows),
    )


@pytest.mark.parametrize("batch", [1, 16])
def test_value_and_gradient_need_linear_memory(compile_for, batch):
    short, long = (
        compile_for(whole, *specs(length, batch=batch)).temporary_bytes
        for length in (16384, 131072)
    )
    assert dispatch.choices()["occupancy"].implementation == "blockwise"
    # Some arrays like log_beta: no tile of pairs is in memory, let alone all of them.
    assert short <= long < 4 * batch * HEADS * 131072 * 4


def test_samples_need_memory_linear_in_length_and_samples(compile_for):
    program = compile_for(sampled, *specs(131072, 1024))
    assert dispatch.choices()["occupancy_at"].implementation == "blockwise"
    assert program.temporary_bytes < 4 * HEADS * (131072 + 1024) * 4
