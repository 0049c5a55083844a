"""Prefill and extend: pure functions over (model, cache), where models meet policies.

tokens -> embed -> for each layer (lax.scan): project, attend over slots, observe,
          score, select, compact -> logits of each row's last token
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax import eviction, placement, remembering, sequence_parallel, strides
from kvjax.assembly import assemble, empty_cache
from kvjax.cache import Cache, Pages, modality
from kvjax.layer_steps import (
    attend,
    last_logits,
    layer_ids,
    observation_of,
    prompt_positions,
    window_queries,
)
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.policies.observation import MODALITY, State


def prefill(
    model: Decoder,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    budget: Int[Array, " B"],
    *,
    policy: Policy,
    capacity: int,
    pages: Pages | None = None,
    params: Any = None,
    modalities: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Whole prefill: every layer attends to the full prompt and leaves the layer compacted.

    `tokens` are right-padded; `budget` is entries per head and row; `capacity` is the most slots
    a head gets; with `pages` the cache is paged; `params` are the policy's learned arrays,
    stacked over layers; with `modalities` the cache carries each entry's (`modality_counts`).
    Returns the logits of each row's last token and the cache.

    The full cache of one layer at a time is alive, beside what the layers before kept. An
    allocator that crosses layers decides after the last of them: until then each head keeps its
    best `capacity` entries as candidates, so that bound is also the bound of the peak.

    Of a model on a mesh with an axis `sequence`, each device works on its share of the tokens.
    """
    remembering.check_params(policy, params, model.config)
    mesh = placement.mesh_of(model)
    tokens, modalities = (sequence_parallel.padded(a, mesh) for a in (tokens, modalities))
    windows = jnp.asarray(model.windows)
    positions = prompt_positions(tokens, lengths)
    budgets = eviction.layer_budgets(policy, budget, lengths, model.config.num_layers)

    def body(carry: Any, inputs: Any) -> tuple[Any, eviction.Kept]:
        (x, before), (layer, window, index, layer_budget, layer_params) = carry, inputs
        rotation = model.rotation(positions)
        x, new, column = attend(layer, x, rotation, positions, window, policy.needs, mesh=mesh)
        queries = window_queries(policy.window, new, positions, policy.needs)
        observation = observation_of(
            model, layer, index, positions, lengths, policy.needs, new, queries, column
        )
        kept, before = eviction.cut_layer(
            policy, observation, layer_budget, window, capacity, layer_params,
            model.config.num_heads, modalities=modalities, before=before,
        )  # fmt: skip
        return (x, before), kept

    inputs = (model.layers, windows, layer_ids(model), budgets, params)
    shape = (tokens.shape[0], model.config.num_kv_heads, tokens.shape[1])
    start = (model.embed(tokens), strides.first(policy, model.config, shape))
    (x, _), kept = lax.scan(body, start, inputs)
    cache = assemble(model, policy, kept, budget, lengths, capacity, pages, params)
    return last_logits(model, x, lengths), placement.settled(cache, mesh)


def prefill_chunked(
    model: Decoder,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    budget: Int[Array, " B"],
    *,
    policy: Policy,
    capacity: int,
    pages: Pages | None = None,
    params: Any = None,
    modalities: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Chunked prefill: each chunk attends to the evicted cache and itself, then evicts.

    Memory is capacity + chunk whatever the prompt's length. Later chunks never see what earlier
    ones evicted, so the result differs from whole prefill once the budget is exceeded.
    """
    chunk = policy.schedule.chunk
    batch, length = tokens.shape
    count = -(-length // chunk)

    def cut(array: Array) -> Array:
        padded = jnp.pad(array, ((0, 0), (0, count * chunk - length)))
        return jnp.moveaxis(padded.reshape(batch, count, chunk), 1, 0)

    pieces = None if modalities is None else cut(modalities)
    cache = empty_cache(model, batch, capacity, policy, pages, modalities=modalities is not None)
    cache = placement.settled(cache, placement.mesh_of(model))

    def body(carry: Any, inputs: Any) -> tuple[Any, None]:
        logits, cache = carry
        start, piece, kinds = inputs
        here = jnp.clip(lengths - start, 0, chunk)
        now, cache = extend(
            model, cache, piece, here, budget=budget, policy=policy, params=params, interval=1,
            modalities=kinds,
        )  # fmt: skip
        return (jnp.where((here > 0)[:, None], now, logits), cache), None

    starts = jnp.arange(count, dtype=jnp.int32) * chunk
    logits = jnp.zeros((batch, model.config.vocab_size), jnp.float32)
    (logits, cache), _ = lax.scan(body, (logits, cache), (starts, cut(tokens), pieces))
    if policy.schedule.decode_interval is None:
        cache = dataclasses.replace(cache, policy_state=cache.policy_state.without_policy())
    return logits, cache


def extend(
    model: Decoder,
    cache: Cache,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    budget: Int[Array, " B"] | None = None,
    policy: Policy | None = None,
    params: Any = None,
    interval: int | None = None,
    modalities: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Runs `lengths` new tokens of each row against the cache and appends them.

    One function for prefill chunks, follow-up questions and decode steps. All new tokens attend
    to every slot and causally to each other; then, where `policy` is given, rows whose mean head
    has grown to budget + `interval` entries (default: the schedule's decode interval), or whose
    tokens would not fit, are cut back to `budget`. Without a policy, or with one that evicts once,
    nothing is evicted, and tokens that find no slot are counted in `cache.overflowed`. A cache
    that carries a memory needs the policy that wrote it, with its `params`: new tokens read it as
    it was before the call. In a cache that carries modalities, tokens without `modalities` are
    text.

    The cache is read-only inside the layer scan and written once behind it, so a donated cache
    is updated in place. Returns the logits of each row's last new token.
    """
    if policy is not None and policy.scorer is not None:
        interval = interval or policy.schedule.decode_interval
    else:
        interval = None
    if policy is None or interval is None:
        return _extend_only(model, cache, tokens, lengths, policy, params, modalities)
    if budget is None:
        raise ValueError(f"extend with policy {policy.name!r} needs a budget (entries per head)")
    return _extend_and_evict(
        model, cache, tokens, lengths, budget, policy, params, interval, modalities
    )


def _extend_only(
    model: Decoder,
    cache: Cache,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    policy: Policy | None,
    params: Any,
    modalities: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B V"], Cache]:
    if cache.policy_state.slots.keys() - {MODALITY} or cache.policy_state.own:
        raise ValueError(
            "extend: this cache carries the state of a policy that evicts while decoding; pass "
            "that policy and its budget"
        )
    params, memory = remembering.memory_of(cache, policy, params, model.config)
    state = modality.of_union(State(layer=memory), cache, modalities, tokens.shape[1])
    positions = _next_positions(cache, tokens, lengths)
    rotation = model.rotation(positions)

    def body(x: Array, inputs: Any) -> tuple[Array, Any]:
        layer, window, view, *remembered = inputs
        read = remembering.reader(policy, *remembered)
        x, new, _ = attend(layer, x, rotation, positions, window, frozenset(), (cache, view), read)
        return x, (new.keys, new.values)

    inputs = (model.layers, jnp.asarray(model.windows), cache.views, params, memory)
    x, (keys, values) = lax.scan(body, model.embed(tokens), inputs)
    return last_logits(model, x, lengths), cache.append(keys, values, positions, state)


def _extend_and_evict(
    model: Decoder,
    cache: Cache,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    budget: Int[Array, " B"],
    policy: Policy,
    params: Any,
    interval: int,
    modalities: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B V"], Cache]:
    config = model.config
    strides.check(policy, config)
    memory_params, memory = remembering.memory_of(cache, policy, params, config)
    scorer_params, _ = policy.split(params)
    windows = jnp.asarray(model.windows)
    positions = _next_positions(cache, tokens, lengths)
    rotation = model.rotation(positions)
    next_position = cache.next_position + lengths
    budgets = eviction.layer_budgets(policy, budget, next_position, config.num_layers)
    full = eviction.due(cache, lengths, budgets, windows, interval)
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    fields, _ = eviction.state_fields(policy, *heads, model.dtype)
    lead = (cache.batch, cache.num_kv_heads, tokens.shape[1])

    def body(carry: Any, inputs: Any) -> tuple[Any, Any]:
        x, before = carry
        layer, window, index, layer_budget, layer_params, view, old, *remembered = inputs
        cached, read = (cache, view), remembering.reader(policy, *remembered)
        x, new, column = attend(layer, x, rotation, positions, window, policy.needs, cached, read)
        state = State(slots=cache.dense_slots(view, index), layer=old)
        state = eviction.grow(state, fields, lead)
        queries = window_queries(
            policy.window, new, positions, policy.needs, eviction.earlier_queries(state)
        )
        observation = observation_of(
            model, layer, index, positions, next_position, policy.needs, new, queries, column,
            cached,
        )  # fmt: skip
        observation = dataclasses.replace(observation, budget=layer_budget)
        state, before = strides.update(policy, observation, layer_params, state, before)
        state = eviction.with_queries(state, observation)

        def judge() -> eviction.Verdict:
            return eviction.judge(policy, observation, layer_budget, window, layer_params, state)

        verdict = lax.cond(jnp.any(full), judge, lambda: eviction.no_verdict(observation.positions))
        return (x, before), (new.keys, new.values, state, observation.valid, verdict)

    inputs = (model.layers, windows, layer_ids(model), budgets, scorer_params)
    # Only a cut changes the memory: the scan reads it and does not write it again.
    cached = (cache.views, cache.policy_state.own, memory_params, memory)
    shape = (*lead[:2], cache.capacity + lead[2])
    start = (model.embed(tokens), strides.first(policy, config, shape))
    (x, _), (keys, values, state, valid, verdict) = lax.scan(body, start, (*inputs, *cached))
    state = State(slots=state.slots, layer=state.layer | memory)
    state = modality.of_union(state, cache, modalities, tokens.shape[1])

    def cut() -> Cache:
        keep = eviction.stay(policy, verdict, valid, budget, next_position, windows, cache.capacity)
        keep = jnp.where(full[None, :, None, None], keep, valid)

        def absorb(layer: Array, k: Array, v: Array, slots: Array) -> tuple[Array, Array]:
            return policy.remainder.apply(k, v, slots, keep[layer], verdict.scores[layer])

        kept_state = state
        if policy.remembers:
            written = remembering.remember_all(
                policy, memory_params, cache, keys, values, positions, keep, windows,
                jnp.asarray(model.rope_frequencies[0]),
            )  # fmt: skip
            kept_state = State(slots=state.slots, layer=state.layer | written)
        changes = absorb if policy.remainder.changes_entries else None
        return cache.keep(keep, keys, values, positions, kept_state, changes)

    cache = lax.cond(jnp.any(full), cut, lambda: cache.append(keys, values, positions, state))
    return last_logits(model, x, lengths), cache


def _next_positions(
    cache: Cache, tokens: Int[Array, "B T"], lengths: Int[Array, " B"]
) -> Int[Array, "B T"]:
    place = prompt_positions(tokens, lengths)
    return jnp.where(place >= 0, cache.next_position[:, None] + place, -1)
