"""Caches for a model and a policy: empty ones, and ones made of what the layers kept."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax import eviction
from kvjax.cache import Cache, PaddedCache, PagedCache, Pages
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Policy, StateField, new_state
from kvjax.policies.observation import MODALITY, State


def empty_cache(
    model: Decoder,
    batch: int,
    capacity: int,
    policy: Policy | None = None,
    pages: Pages | None = None,
    *,
    modalities: bool = False,
) -> Cache:
    """An empty cache for this model, with the state that `policy` keeps over calls.

    With `modalities` it carries the modality of its entries.
    """
    config = model.config
    rows = (config.num_layers, batch)
    slots: dict[str, StateField] = {}
    layer: dict[str, StateField] = {}
    if policy is not None:
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        slots, layer = eviction.state_fields(policy, *heads, model.dtype)
    if modalities:
        slots = slots | {MODALITY: StateField(dtype=jnp.int8)}
    lead: tuple[int, ...] = (*rows, config.num_kv_heads, capacity)
    if pages is not None:
        lead = (batch, pages.pool, pages.size)
    state = State(slots=new_state(slots, lead), layer=new_state(layer, rows))
    shape: dict[str, Any] = {
        "num_layers": config.num_layers,
        "batch": batch,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "dtype": model.dtype,
        "policy_state": state,
    }
    if pages is not None:
        return PagedCache.empty(pages=pages, **shape)
    return PaddedCache.empty(capacity=capacity, **shape)


def assemble(
    model: Decoder,
    policy: Policy,
    kept: eviction.Kept,
    budget: Int[Array, " B"],
    lengths: Int[Array, " B"],
    capacity: int,
    pages: Pages | None,
    params: Any = None,
) -> Cache:
    """A cache from what the layers kept, after the last cut of allocators that cross layers."""
    if policy.scorer is not None and policy.allocator.crosses_layers:
        kept = eviction.cut_candidates(
            policy,
            kept,
            budget,
            lengths,
            jnp.asarray(model.windows),
            capacity,
            params,
            jnp.asarray(model.rope_frequencies[0]),
        )
    repeats = policy.schedule.decode_interval is not None
    state = kept.state if repeats else kept.state.without_policy()
    if pages is not None:
        empty = empty_cache(
            model,
            lengths.shape[0],
            capacity,
            policy if repeats else None,
            pages,
            modalities=MODALITY in state.slots,
        )
        assert isinstance(empty, PagedCache)
        return empty.fill(kept.keys, kept.values, kept.positions, kept.lengths, lengths, state)
    return PaddedCache(
        keys=kept.keys,
        values=kept.values,
        positions=kept.positions,
        lengths=kept.lengths,
        next_position=lengths,
        overflowed=jnp.zeros_like(lengths),
        policy_state=state,
    )
