"""SnapKV: the last queries of the prompt vote for the entries they attend to."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.window_scores import window_scores
from kvjax.policies.base import Params, Protection, Scorer
from kvjax.policies.needed import needed
from kvjax.policies.observation import Observation, State
from kvjax.policies.pooling import check_pooling, pool
from kvjax.policies.registry import register
from kvjax.whole import check_whole


@register("snapkv")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKV(Scorer):
    """Attention of the last `window` queries, averaged over queries and group, then pooled.

    s[j] = pool_k(mean over group and window of softmax(q K^T / sqrt(D)))[j] for j before the
    window, whose own entries are protected and do not enter the pooling. A prompt shorter than
    the window is averaged over the queries it has.

    Paper: SnapKV (arXiv 2404.14469). Defaults: window 32, average pooling of width 5.
    Deviation: one set per KV head (mean over its query group) instead of one per query head.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"queries"})
    window: int = 32
    kernel: int = 5
    pooling: Literal["avg", "max"] = "avg"

    def __post_init__(self) -> None:
        check_whole("window", self.window, 1)
        check_pooling(self.kernel, self.pooling)

    def protection(self) -> Protection:
        return Protection(sinks=0, recent=self.window)

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        del params, state
        mean = window_scores(
            needed(observation.queries, "queries"),
            observation.keys,
            needed(observation.query_positions, "queries"),
            observation.positions,
        )
        start = observation.next_position - self.window
        before_window = observation.positions < start[:, None, None]
        pooled = pool(jnp.where(before_window, mean, 0.0), self.kernel, self.pooling)
        return jnp.where(before_window, pooled, mean)
