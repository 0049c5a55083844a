"""LagKV: each stretch of tokens is judged against the statistics of the stretch that follows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.base import Params, Protection, Scorer
from kvjax.policies.observation import Observation, State
from kvjax.policies.registry import register


@register("lagkv")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LagKV(Scorer):
    """Spread over channels of K and V after scaling by the next partition's range.

    x' = (x - min_{p+1}) / (max_{p+1} - min_{p+1}) per channel,
    c[j] = mean over K and V of softmax_j(std over channels of x'[j]) inside partition p,
    s[j] = rank of c[j] in its partition / lag

    The ranks make every partition keep the same share. The last full partition and the
    remainder have no reference and rank above all others, newest first.

    Paper: LagKV (arXiv 2504.04704). Defaults: 4 sinks before the first partition, lag 128.
    Deviations: K and V scores are averaged, not summed (the same order); a channel that is
    constant in the reference counts as 0; partitions count the entries still cached.
    """

    lag: int = 128
    skip: int = 4

    def __post_init__(self) -> None:
        if self.lag < 2 or self.skip < 0:
            raise ValueError(f"lag={self.lag}, skip={self.skip}: allowed are lag >= 2, skip >= 0")

    def protection(self) -> Protection:
        return Protection(sinks=self.skip, recent=self.lag)

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        del params, state
        positions = observation.positions
        slots = positions.shape[-1]
        partitioned = observation.valid & (positions >= self.skip)
        index = jnp.cumsum(partitioned, axis=-1) - 1
        order = jnp.argsort(~partitioned, axis=-1, stable=True)
        partitions = -(-slots // self.lag)
        surplus = partitions * self.lag - slots

        def spread(x: Float[Array, "B K S D"]) -> Float[Array, "B K P lag"]:
            x = jnp.take_along_axis(x, order[..., None], axis=2).astype(jnp.float32)
            x = jnp.pad(x, ((0, 0), (0, 0), (0, surplus), (0, 0)))
            x = x.reshape(*x.shape[:2], partitions, self.lag, x.shape[-1])
            low, high = jnp.min(x, axis=3), jnp.max(x, axis=3)
            low, high = jnp.roll(low, -1, axis=2), jnp.roll(high, -1, axis=2)
            extent = high - low
            scale = jnp.where(extent > 0, 1.0 / jnp.where(extent > 0, extent, 1.0), 0.0)
            scaled = (x - low[..., None, :]) * scale[..., None, :]
            return jax.nn.softmax(jnp.std(scaled, axis=-1, ddof=1), axis=-1)

        combined = (spread(observation.keys) + spread(observation.values)) * 0.5
        by_score = jnp.argsort(combined, axis=-1, stable=True)
        rank = jnp.argsort(by_score, axis=-1, stable=True).astype(jnp.float32) / self.lag
        rank = jnp.take_along_axis(
            rank.reshape(*rank.shape[:2], -1), jnp.maximum(index, 0), axis=-1
        )
        complete = jnp.sum(partitioned, axis=-1, keepdims=True) // self.lag
        has_reference = partitioned & (index < (complete - 1) * self.lag)
        return jnp.where(has_reference, rank, 1.0 + positions.astype(jnp.float32))
