"""Layers that take over what the layer before knows of the entries, and do not compute it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from kvjax.models.config import ModelConfig
from kvjax.policies.base import Policy, Uniform, new_state
from kvjax.policies.observation import Observation, State


def first(policy: Policy, config: ModelConfig, shape: Sequence[int]) -> State | None:
    """What a scan over layers hands to layer 0 as `before`; None where every layer scores.

    `shape` is [B, K, S] with the slots that a layer's observation has.
    """
    if policy.scorer is None or policy.scorer.stride == 1:
        return None
    scorer = policy.scorer.for_model(config.num_heads, config.head_dim)
    slots, layer = scorer.slot_fields(), scorer.layer_fields()
    return State(slots=new_state(slots, shape), layer=new_state(layer, shape[:1]))


def update(
    policy: Policy, observation: Observation, params: Any, state: State, before: State | None
) -> tuple[State, State | None]:
    """The scorer's state after this call, and what the next layer gets as `before`.

    Of every `scorer.stride` layers the first computes its state and the others take it over.
    """
    scorer = policy.scorer
    assert scorer is not None
    if before is None:
        return scorer.update(observation, params, state), None

    def own() -> State:
        return _taken(scorer.update(observation, params, state), before)

    shared = lax.cond(observation.layer % scorer.stride == 0, own, lambda: before)
    return State(slots=state.slots | shared.slots, layer=state.layer | shared.layer), shared


def check(policy: Policy, config: ModelConfig) -> None:
    """Refuses a cache that goes on evicting where the layers of a group hold different tokens."""
    if policy.scorer is None or policy.scorer.stride == 1:
        return
    if type(policy.allocator) is not Uniform or any(config.windows):
        raise ValueError(
            f"policy {policy.name!r} has stride={policy.scorer.stride}: while it goes on evicting, "
            "allowed with uniform budgets and a model without sliding-window layers only"
        )


def _taken(state: State, names: State) -> State:
    return State(
        slots={name: state.slots[name] for name in names.slots},
        layer={name: state.layer[name] for name in names.layer},
    )
