"""Random eviction: the floor that every method has to clear."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from kvjax.policies.base import Params, Scorer
from kvjax.policies.observation import Observation, State
from kvjax.policies.registry import register


@register("random")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Random(Scorer):
    """A uniform number in [0, 1) per (seed, layer, KV head, position).

    s[j] = hash(seed, layer, head, position_j) / 2^24

    No paper. Defaults: seed 0, sinks 4. The number is a hash and not a draw, so a token has the
    same score in every row, chunk and decode step.
    """

    seed: int = 0

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        del params, state
        head = jnp.arange(observation.keys.shape[1], dtype=jnp.uint32)[None, :, None]
        bits = _mix(jnp.uint32(self.seed % 2**32) ^ jnp.uint32(0x9E3779B9))
        bits = _mix(bits ^ observation.layer.astype(jnp.uint32))
        bits = _mix(bits ^ head)
        bits = _mix(bits ^ observation.positions.astype(jnp.uint32))
        # 24 bits are what float32 holds exactly.
        return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def _mix(bits: UInt32[Array, "*n"]) -> UInt32[Array, "*n"]:
    """A bijection of 32-bit integers in which every input bit moves every output bit."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)
