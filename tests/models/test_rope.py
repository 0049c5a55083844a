"""Rotary frequencies and rotations against formulas written independently, pair by pair."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.config import RopeConfig
from kvjax.models.rope import apply_rope, rope_frequencies, rotation
from tests.models.small import BASE


def with_rope(head_dim=64, **settings):
    return dataclasses.replace(BASE, head_dim=head_dim, rope=RopeConfig(**settings))


def test_default_and_linear_frequencies():
    frequencies, factor = rope_frequencies(with_rope(theta=1e4))
    expected = [1e4 ** (-2 * i / 64) for i in range(32)]
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    assert factor == 1.0
    slow, _ = rope_frequencies(with_rope(kind="linear", theta=1e4, factor=4.0))
    np.testing.assert_allclose(slow, np.array(expected) / 4, rtol=1e-6)


def test_llama3_frequencies_by_wavelength():
    settings = {"theta": 5e5, "factor": 8.0, "original_max_length": 8192}
    frequencies, factor = rope_frequencies(with_rope(kind="llama3", **settings))
    expected = []
    for i in range(32):
        frequency = 5e5 ** (-2 * i / 64)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected.append(frequency)
        elif wavelength > 8192 / 1:
            expected.append(frequency / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    assert factor == 1.0


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_frequencies_by_rotations(truncate):
    settings = {"theta": 1e4, "factor": 4.0, "original_max_length": 4096, "truncate": truncate}
    frequencies, factor = rope_frequencies(with_rope(kind="yarn", **settings))

    def dimension(rotations):
        return 64 * math.log(4096 / (rotations * 2 * math.pi)) / (2 * math.log(1e4))

    low, high = dimension(32), dimension(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    expected = []
    for i in range(32):
        ramp = min(1.0, max(0.0, (i - low) / (high - low)))
        frequency = 1e4 ** (-2 * i / 64)
        expected.append(frequency / 4 * ramp + frequency * (1 - ramp))
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_attention_factor_is_given_or_from_the_mscales():
    settings = {"kind": "yarn", "factor": 40.0, "original_max_length": 4096}
    _, given = rope_frequencies(with_rope(**settings, attention_factor=0.75))
    assert given == 0.75
    _, derived = rope_frequencies(with_rope(**settings, mscale=1.0, mscale_all_dim=0.5))
    top, bottom = 0.1 * math.log(40) + 1, 0.05 * math.log(40) + 1
    assert derived == pytest.approx(top / bottom)


def test_rotation_multiplies_complex_pairs():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 5, 16)).astype(np.float32)
    positions = rng.integers(0, 4000, size=(2, 5)).astype(np.int32)
    frequencies, _ = rope_frequencies(with_rope(head_dim=16))
    cos, sin = rotation(jnp.asarray(positions), frequencies, 1.5)
    rotated = np.asarray(apply_rope(jnp.asarray(x), cos, sin))
    angles = positions[:, None, :, None].astype(np.float64) * frequencies
    pairs = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * angles) * 1.5
    expected = np.concatenate([pairs.real, pairs.imag], axis=-1)
    np.testing.assert_allclose(rotated, expected, atol=2e-3)


def test_a_rotation_per_head_equals_the_shared_one_where_positions_agree():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 4, 8)), jnp.float32)
    positions = jnp.array([[0, 3, 9, 10], [5, 6, 7, 90]])
    shared = apply_rope(x, *rotation(positions, rope_frequencies(BASE)[0]))
    each = jnp.broadcast_to(positions[:, None], (2, 3, 4))
    own = apply_rope(x, *rotation(each, rope_frequencies(BASE)[0]))
    np.testing.assert_array_equal(shared, own)


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="original_max_length 0"):
        RopeConfig(kind="yarn", factor=2.0)
    with pytest.raises(ValueError, match="low_freq_factor 4"):
        RopeConfig(kind="llama3", original_max_length=8, low_freq_factor=4.0)
