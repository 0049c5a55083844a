"""CAKE: steady attention and how it moves, and budgets for the layers that need them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.window_scores import window_moments
from kvjax.policies.base import Allocator, Params, Protection, Scorer
from kvjax.policies.competition import (
    apportion,
    ceiling_entries,
    check_ceiling,
    largest_under,
)
from kvjax.policies.needed import needed
from kvjax.policies.observation import Observation, State
from kvjax.policies.pooling import check_pooling, pool
from kvjax.policies.registry import register
from kvjax.whole import check_whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cake(Allocator):
    """Layers share the budget by how widely, and how restlessly, their last queries attend.

    P_l = H_l^(1/tau1) V_l^(1/tau2): H_l = -sum a log a over heads, window queries and entries
    before the window; V_l = sum over heads and entries of the unbiased variance over the queries.
    Layer l keeps P_l / sum(P) (budget - window) L entries and its window; what exceeds the limit
    of a layer is spread evenly over the others.

    Paper: CAKE (arXiv 2503.12491). Defaults: window 32, tau1 = tau2 = 1. Deviations: rounded so
    that the total is exact; every row is held to its budget, also one barely longer than it; no
    head gets more than `ceiling` times the budget, which bounds the candidates that have to be
    kept until the last layer is known (None: no ceiling, and all entries are candidates).
    """

    crosses_layers: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"queries"})
    window: int = 32
    tau1: float = 1.0
    tau2: float = 1.0
    ceiling: float | None = 4.0

    def __post_init__(self) -> None:
        check_whole("window", self.window, 1)
        if not (self.tau1 > 0 and self.tau2 > 0):
            raise ValueError(f"tau1={self.tau1}, tau2={self.tau2}: allowed are numbers > 0")
        check_ceiling(self.ceiling)

    def preference(self, observation: Observation) -> Float[Array, " B"]:
        (_, variance, entropy_terms), entries = _moments(observation, self.window)
        kv_heads = entries.shape[1]
        entries = jnp.repeat(entries, variance.shape[1] // kv_heads, axis=1)
        entropy = jnp.sum(jnp.where(entries, entropy_terms, 0.0), axis=(1, 2))
        restless = jnp.sum(jnp.where(entries, variance, 0.0), axis=(1, 2))
        return jnp.maximum(entropy, 0.0) ** (1 / self.tau1) * restless ** (1 / self.tau2)

    def allocate(
        self,
        scores: Float[Array, "L B K S"],
        valid: Bool[Array, "L B K S"],
        rank: Int[Array, "L B K S"],
        budget: Int[Array, " B"],
        lengths: Int[Array, " B"],
        preference: Float[Array, "L B"] | None = None,
    ) -> Int[Array, "L B K"]:
        if preference is None:
            raise ValueError("Cake.allocate needs every layer's `preference(observation)`")
        layers = scores.shape[0]
        held = jnp.sum(valid, axis=-1, dtype=jnp.int32)
        window = jnp.minimum(self.window, budget)
        total = jnp.sum(preference, axis=0, keepdims=True)
        even = jnp.full_like(preference, 1 / layers)
        share = jnp.where(total > 0, preference / jnp.where(total > 0, total, 1.0), even)
        pool = (layers * (budget - window)).astype(jnp.float32)
        wanted = window.astype(jnp.float32)[None] + share * pool[None]
        high = jnp.minimum(jnp.max(held, axis=2), ceiling_entries(self.ceiling, budget)[None]).T
        split = apportion(wanted.T, layers * budget, jnp.minimum(high, 1), high)
        return jnp.minimum(split.T[:, :, None], held)

    def largest(self, budget: int, length: int, num_layers: int, num_kv_heads: int) -> int:
        del num_kv_heads
        most = num_layers * (budget - 1) + 1
        return min(length, most, largest_under(self.ceiling, budget, most))


@register("cake")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CAKE(Scorer):
    """Mean plus variance of the attention an entry gets from the last `window` queries.

    s[j] = mean over group of pool_5(mean_t a_t[j] + gamma var_t a_t[j]) for entries before the
    window, which itself is protected; var is unbiased. Layers share the budget by preference
    (allocator `Cake`).

    Paper: CAKE (arXiv 2503.12491). Defaults: window 32, gamma 200, average pooling of width 5,
    tau1 = tau2 = 1 (the paper tunes them per model, e.g. 1.6 and 0.4 for Llama-3.1-8B at 1024).
    Deviations: one set per KV head; see the allocator for its ceiling.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"queries"})
    window: int = 32
    kernel: int = 5
    gamma: float = 200.0
    tau1: float = 1.0
    tau2: float = 1.0

    def __post_init__(self) -> None:
        check_pooling(self.kernel, "avg")
        self.allocator()  # refuses a window or exponents that mean nothing

    def protection(self) -> Protection:
        return Protection(sinks=0, recent=self.window)

    def allocator(self) -> Allocator:
        return Cake(window=self.window, tau1=self.tau1, tau2=self.tau2)

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        del params, state
        (mean, variance, _), entries = _moments(observation, self.window)
        batch, kv_heads, slots = entries.shape
        value = (mean + self.gamma * variance).reshape(batch, kv_heads, -1, slots)
        joined = jnp.mean(value, axis=2)
        pooled = pool(jnp.where(entries, joined, 0.0), self.kernel)
        return jnp.where(entries, pooled, joined)


def _moments(
    observation: Observation, window: int
) -> tuple[tuple[Array, Array, Array], Bool[Array, "B K S"]]:
    """Moments of each head's attention over the window, and which entries lie before it."""
    moments = window_moments(
        needed(observation.queries, "queries")[:, :, -window:],
        observation.keys,
        needed(observation.query_positions, "queries")[:, -window:],
        observation.positions,
    )
    before_window = observation.next_position[:, None, None] - window
    return moments, observation.valid & (observation.positions < before_window)
