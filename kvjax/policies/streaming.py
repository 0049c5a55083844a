"""StreamingLLM: attention sinks and a recent window."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.base import Params, Schedule, Scorer
from kvjax.policies.observation import Observation, State
from kvjax.policies.registry import register


@register("streaming")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Streaming(Scorer):
    """The first 4 tokens and the newest ones.

    s[j] = position_j

    Paper: StreamingLLM (arXiv 2309.17453). Defaults: 4 sinks, rolling at every decoded token.
    Deviation: keys keep the rotation of their true positions instead of positions inside the
    cache.
    """

    def schedule(self) -> Schedule:
        return Schedule(decode_interval=1)

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        del params, state
        return observation.positions.astype(jnp.float32)
