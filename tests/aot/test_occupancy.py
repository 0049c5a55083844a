"""Soft occupancy, which is left to XLA, compiles for the devices in linear memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import dispatch
from kernels_pallas.occupancy import occupancy, occupancy_at

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
    tile = batch * HEADS * 128 * 128 * 4
    line = batch * HEADS * 131072 * 4
    assert short <= long < 16 * line + 8 * tile
    assert long < 131072 * 131072 * 4 / 16  # far from all pairs of even one head


def test_samples_need_memory_linear_in_length_and_samples(compile_for):
    program = compile_for(sampled, *specs(131072, 1024))
    assert dispatch.choices()["occupancy_at"].implementation == "blockwise"
    line, tile = HEADS * (131072 + 1024) * 4, HEADS * 128 * 128 * 4
    assert program.temporary_bytes < 16 * line + 8 * tile
    assert program.temporary_bytes < HEADS * 131072 * 1024 * 4 / 16
