"""TOVA: what the newest query attends to stays."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from kernels_pallas.window_scores import window_scores
from kvjax.policies.base import Params, Protection, Schedule, Scorer
from kvjax.policies.needed import needed
from kvjax.policies.observation import Observation, State
from kvjax.policies.registry import register
from kvjax.policies.sharing import sum_over_heads


@register("tova")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tova(Scorer):
    """Attention of the last query, averaged over all heads: one shared set per layer.

    s[j] = mean over heads of A_last[j]

    Paper: Transformers are Multi-State RNNs (arXiv 2401.06104). Defaults: no sinks, no recent
    window, eviction at every decoded token; the newest token competes like all others.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"queries"})
    window: int = 1

    def __post_init__(self) -> None:
        if self.window != 1:
            raise ValueError(f"window={self.window}: TOVA looks at the last query only; allowed: 1")

    def protection(self) -> Protection:
        return Protection(sinks=0)

    def schedule(self) -> Schedule:
        return Schedule(decode_interval=1)

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        del params, state
        queries = needed(observation.queries, "queries")
        per_head = window_scores(
            queries[:, :, -1:],
            observation.keys,
            needed(observation.query_positions, "queries")[:, -1:],
            observation.positions,
            over_queries="sum",
            over_group="sum",
        )
        return sum_over_heads(per_head, observation.positions) / queries.shape[1]
