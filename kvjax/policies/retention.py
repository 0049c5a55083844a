"""Global retention: learned gates say at birth how long an entry will be useful."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvjax.learned.retention import log_beta, log_utility
from kvjax.policies.allocators import Global
from kvjax.policies.base import Params, Policy, Protection, Schedule, Scorer, StateField
from kvjax.policies.needed import needed
from kvjax.policies.observation import Observation, State
from kvjax.policies.registry import register
from kvjax.whole import check_whole

_DECODE_BUFFER = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention(Scorer):
    """Expected uses of an entry in the next `lookahead` steps, from its learned retention.

    s[j] = log sum_(m=0)^(n-1) beta_j^(age_j + m),  age_j = tokens seen + 1 - position_j

    beta comes from gates on the hidden state (`kvjax.learned.retention`) when the token enters
    the cache, and stays with its entry in float32. A score depends on the token and its age
    only, never on a query, so one compressed cache serves every later question. Nothing is
    protected: sinks and recent windows are learned.

    Papers: TRIM-KV (arXiv 2512.03324), Make Each Token Count (arXiv 2605.09649). Defaults:
    lookahead 1, no sinks, no recent window; while decoding a row is cut back when it has grown
    by 32 tokens per head. The gates are those in the directory `path`, else the module of the name
    `module` that ships for the backbone.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"hidden"})
    module: str = "retention-global"
    path: str | None = None
    lookahead: int = 1

    def __post_init__(self) -> None:
        check_whole("lookahead", self.lookahead, 1)

    def protection(self) -> Protection:
        return Protection(sinks=0)

    def schedule(self) -> Schedule:
        return Schedule(decode_interval=_DECODE_BUFFER)

    def slot_fields(self) -> dict[str, StateField]:
        return {"log_beta": StateField()}

    def update(self, observation: Observation, params: Params, state: State) -> State:
        hidden = needed(observation.hidden, "hidden")
        if not isinstance(params, dict) or "w1" not in params:
            raise ValueError(
                "retention needs params, the gates of this backbone: take them from "
                "kvjax.policy_params(model, policy), or train them with kvjax train"
            )
        new = log_beta(params, hidden, observation.keys.shape[1])
        held = state.slots["log_beta"]
        start = held.shape[2] - new.shape[2]  # this call's tokens are the last slots
        held = lax.dynamic_update_slice_in_dim(held, new, start, axis=2)
        return dataclasses.replace(state, slots={**state.slots, "log_beta": held})

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        del params
        seen = observation.next_position[:, None, None]
        age = (seen + 1 - observation.positions).astype(jnp.float32)
        return log_utility(state.slots["log_beta"], age, self.lookahead)


@register("retention-local")
def retention_local(path: str | None = None, lookahead: int = 1) -> Policy:
    """Retention gates with the same budget for every head of every layer (TRIM-KV).

    Paper: TRIM-KV (arXiv 2512.03324); the score is `Retention`'s.
    """
    return _policy("retention-local", path, lookahead)


@register("retention-global")
def retention_global(
    path: str | None = None,
    lookahead: int = 1,
    floor: int | float = 0,
    ceiling: float | None = 4.0,
) -> Policy:
    """Retention gates under one budget for which all layers and heads compete.

    Paper: Make Each Token Count (arXiv 2605.09649); the score is `Retention`'s. `floor` entries
    of every head are safe, and none gets more than `ceiling` times the mean budget, which bounds
    the peak of a whole prefill (the paper has no such bound: None).
    """
    policy = _policy("retention-global", path, lookahead)
    return dataclasses.replace(policy, allocator=Global(floor=floor, ceiling=ceiling))


def _policy(name: str, path: str | None, lookahead: int) -> Policy:
    scorer = Retention(module=name, path=path, lookahead=lookahead)
    return Policy(
        name=name, scorer=scorer, protection=scorer.protection(), schedule=scorer.schedule()
    )
