"""Rotary position embedding in the half-split (Hugging Face) convention."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from kvjax.models.config import ModelConfig, RopeConfig


def rope_frequencies(config: ModelConfig) -> tuple[Float32[np.ndarray, " half"], float]:
    """Angular frequencies [D/2] in radians per token, and the factor on cos and sin.

    Sources: RoFormer arXiv:2104.09864; linear scaling arXiv:2306.15595; Llama 3.1
    arXiv:2407.21783; YaRN arXiv:2309.00071, section 3 (the factor is its attention temperature).
    """
    rope, dim = config.rope, config.head_dim
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    frequencies = rope.theta**-exponents
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif rope.kind == "yarn":
        frequencies = _yarn(frequencies, rope, dim)
    return frequencies.astype(np.float32), attention_factor(rope)


def attention_factor(rope: RopeConfig) -> float:
    """The factor on cos and sin: 1 except for yarn, where it is 0.1 ln(factor) + 1 by default."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def rotation(
    positions: Int[Array, "*n"],
    frequencies: Float32[Array | np.ndarray, " half"],
    attention_factor: float = 1.0,
) -> tuple[Float32[Array, "*n half"], Float32[Array, "*n half"]]:
    """Cosines and sines of the rotation angles at absolute `positions`."""
    inverse = jnp.asarray(frequencies, jnp.float32).reshape((1,) * positions.ndim + (-1,))
    angles = positions[..., None].astype(jnp.float32) * inverse
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def apply_rope(
    x: Float[Array, "B H T D"],
    cos: Float32[Array, "B T half"] | Float32[Array, "B H T half"],
    sin: Float32[Array, "B T half"] | Float32[Array, "B H T half"],
) -> Float[Array, "B H T D"]:
    """Rotate the pairs (x[i], x[i + D/2]); computed in float32, returned in the dtype of x.

    A rotation without a head axis is shared by all heads.
    """
    if cos.ndim == x.ndim - 1:
        cos, sin = cos[..., None, :, :], sin[..., None, :, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    with jax.named_scope("rope"):
        rotated = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _llama3(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    # Rotations within the pretraining length decide: many keep their frequency, few are
    # slowed by the factor, and between the two thresholds the two are mixed.
    turns = rope.original_max_length * frequencies / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / rope.factor


def _yarn(frequencies: np.ndarray, rope: RopeConfig, dim: int) -> np.ndarray:
    def boundary(turns: float) -> float:
        # The (fractional) pair index that makes `turns` rotations in the pretraining length.
        wavelength = rope.original_max_length / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = boundary(rope.beta_fast), boundary(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # Equal boundaries would divide by zero; the offset is that of the reference code.
    width = high - low if high != low else 0.001
    slow = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    return (1 - slow) * frequencies + slow * frequencies / rope.factor


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
