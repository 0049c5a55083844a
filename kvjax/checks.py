"""What a call refuses at the door, each in one line that names the value and what is allowed.

Under jit values are not known: checks that need them are left out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.cache import Cache
from kvjax.eviction import state_fields
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.policies.observation import MODALITY

LARGEST_MODALITY = 127  # that an int8 slot array holds


def check_tokens(model: Decoder, tokens: Int[Array, "B T"], lengths: Int[Array, " B"]) -> None:
    """Refuses empty prompts, prompts beyond the context and ids outside the vocabulary."""
    if isinstance(tokens, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        return
    counts, limit = np.asarray(lengths), model.config.max_length
    if counts.size == 0 or counts.min() < 1:
        raise ValueError("empty prompt: every row needs at least one token")
    if counts.max() > tokens.shape[1]:
        raise ValueError(f"length {counts.max()}: the tokens have {tokens.shape[1]} columns")
    if counts.max() > limit:
        raise ValueError(f"prompt of {counts.max()} tokens: this model's context is {limit} tokens")
    check_ids(model, tokens)


def check_ids(model: Decoder, tokens: Int[Array, "B T"]) -> None:
    """Refuses ids outside the vocabulary, whose embeddings would be NaN."""
    if isinstance(tokens, jax.core.Tracer) or tokens.size == 0:
        return
    ids = np.asarray(tokens)
    if ids.min() < 0 or ids.max() >= model.config.vocab_size:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"token id {wrong}: allowed are 0 to {model.config.vocab_size - 1}")


def check_modalities(ids: Int[Array | np.ndarray, "..."]) -> None:
    """Refuses ids that a slot array cannot hold."""
    check_integers(ids, "modalities")
    if isinstance(ids, jax.core.Tracer) or ids.size == 0:
        return
    given = np.asarray(ids)
    if given.min() < 0 or given.max() > LARGEST_MODALITY:
        wrong = given.min() if given.min() < 0 else given.max()
        raise ValueError(f"modality {wrong}: allowed are 0 (text) to {LARGEST_MODALITY}")


def check_cache(model: Decoder, cache: Cache) -> None:
    """Refuses a cache whose shape or dtype is not this model's."""
    config = model.config
    wanted = (config.num_layers, config.num_kv_heads, config.head_dim)
    found = (cache.num_layers, cache.num_kv_heads, cache.head_dim)
    if wanted != found:
        raise ValueError(
            f"cache of another model: (layers, KV heads, head size) {found}, the model has {wanted}"
        )
    if cache.keys.dtype != model.dtype:
        raise ValueError(f"cache of dtype {cache.keys.dtype}: this model computes in {model.dtype}")


def check_state(model: Decoder, cache: Cache, policy: Policy) -> None:
    """Refuses a cache without the state that a policy of repeated eviction carries along."""
    config, state = model.config, cache.policy_state
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    slots, layer = state_fields(policy, *heads, model.dtype)
    wanted, found = sorted({*slots, *layer}), sorted({*state.slots, *state.layer} - {MODALITY})
    if wanted != found:
        raise ValueError(
            f"policy {policy.name!r} carries the state {wanted}, this cache {found}: prefill with "
            "the policy and decode_interval that go on"
        )


def check_capacity(
    model: Decoder,
    policy: Policy,
    capacity: int,
    entries: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> None:
    """Refuses slots that do not hold what has to stay."""
    if capacity < 1:
        raise ValueError(f"capacity {capacity}: allowed are integers >= 1")
    if isinstance(entries, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        return
    counts = np.asarray(lengths)
    local = max((window for window in model.config.windows if window is not None), default=0)
    wanted = counts if policy.scorer is None else np.maximum(np.asarray(entries), local)
    if (needed := int(np.minimum(wanted, counts).max())) > capacity:
        raise ValueError(
            f"capacity {capacity}: policy {policy.name!r} keeps up to {needed} entries per head "
            "of these prompts"
        )


def check_room(cache: Cache, counts: Int[Array, " B"], finished: Array | None = None) -> None:
    """Refuses more tokens than every head has free slots for."""
    if isinstance(cache.lengths, jax.core.Tracer) or isinstance(counts, jax.core.Tracer):
        return
    with jax.ensure_compile_time_eval():  # concrete also where a jit closes over the cache
        wanted, room = np.asarray(counts), np.asarray(cache.room())
    if finished is not None and not isinstance(finished, jax.core.Tracer):
        wanted = np.where(np.asarray(finished), 0, wanted)
    if (short := wanted > room).any():
        row = int(np.argmax(short))
        raise ValueError(
            f"{wanted[row]} tokens for a cache with room for {room[row]} (capacity "
            f"{cache.capacity}): prefill with more room, or with a decode_interval"
        )


def check_integers(array: Array | np.ndarray, name: str = "tokens") -> None:
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} of dtype {array.dtype}: allowed are integers")
