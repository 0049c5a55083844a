"""H2O: heavy hitters, the entries with the most attention received so far."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.base import Params, Protection, Schedule, Scorer, StateField
from kvjax.policies.needed import needed
from kvjax.policies.observation import Observation, State
from kvjax.policies.registry import register


@register("h2o")
@dataclasses.dataclass(frozen=True, kw_only=True)
class H2O(Scorer):
    """Attention mass received from all queries so far; half of the budget is recent tokens.

    s[j] = sum over queries t >= j of mean over group of A_t[j]

    Paper: H2O (arXiv 2306.14048). Defaults: recent half of the budget, no sinks, eviction at
    every decoded token, causal column sums (not divided by the number of queries).
    Deviation: one set per KV head (mean over its query group) instead of one per query head.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"column_attention"})

    def protection(self) -> Protection:
        return Protection(sinks=0, recent=0.5)

    def schedule(self) -> Schedule:
        return Schedule(decode_interval=1)

    def slot_fields(self) -> dict[str, StateField]:
        return {"attention_mass": StateField()}

    def update(self, observation: Observation, params: Params, state: State) -> State:
        del params
        batch, kv_heads, slots = observation.positions.shape
        column = needed(observation.column_attention, "column_attention")
        received = column.reshape(batch, kv_heads, -1, slots)
        mass = state.slots["attention_mass"] + jnp.mean(received, axis=2)
        mass = jnp.where(observation.valid, mass, 0.0)
        return dataclasses.replace(state, slots={**state.slots, "attention_mass": mass})

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        del observation, params
        return state.slots["attention_mass"]
