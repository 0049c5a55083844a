"""The modality of every entry, for reports: a slot array that no policy sees.

Entries of all modalities compete for one budget. The array is there only in caches whose prefill
was given `modalities`; because it is slot state, it follows its entry as the keys do, and it
outlives the state of a policy that evicts once.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.cache import Cache
from kvjax.cache.entries import slot_state
from kvjax.policies.observation import MODALITY, State


def of_prompt(state: State, modalities: Int[Array, "B T"] | None, num_kv_heads: int) -> State:
    """One layer's state over a prompt's tokens, with their modality where it is given."""
    if modalities is None:
        return state
    batch, length = modalities.shape
    spread = jnp.broadcast_to(modalities[:, None], (batch, num_kv_heads, length))
    return State(slots=state.slots | {MODALITY: spread.astype(jnp.int8)}, layer=state.layer)


def of_union(
    state: State, cache: Cache, modalities: Int[Array, "B T"] | None, length: int
) -> State:
    """All layers' state over slots and `length` new tokens, with their modality where `cache`
    carries it; tokens of no given modality are text, 0."""
    if MODALITY not in cache.policy_state.slots:
        if modalities is not None:
            raise ValueError(
                "modalities for a cache that carries none: prefill with modalities (zeros for text)"
            )
        return state
    alone = dataclasses.replace(cache, policy_state=cache.policy_state.without_policy())
    held = slot_state(alone)[MODALITY]
    if modalities is None:
        modalities = jnp.zeros((cache.batch, length), jnp.int8)
    new = jnp.broadcast_to(modalities[None, :, None].astype(jnp.int8), (*held.shape[:3], length))
    union = jnp.concatenate([held, new], axis=3)
    return State(slots=state.slots | {MODALITY: union}, layer=state.layer)
