"""Knorm: keys of small norm attract attention."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.base import Params, Protection, Scorer
from kvjax.policies.observation import Observation, State
from kvjax.policies.registry import register


@register("knorm")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Knorm(Scorer):
    """Keeps the keys of the smallest L2 norm.

    s[j] = -||k_j||_2

    Paper: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression
    (arXiv 2406.11430). Defaults: no sinks, no recent window.
    Deviation: the first two layers are compressed like all others.
    """

    def protection(self) -> Protection:
        return Protection(sinks=0)

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        del params, state
        keys = observation.keys.astype(jnp.float32)
        return -jnp.sqrt(jnp.sum(keys * keys, axis=-1))
