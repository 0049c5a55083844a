"""Prefill, extend and compress: pure functions over (model, cache), where models meet policies.

tokens -> embed -> for each layer (lax.scan): project, attend over slots, observe,
          score, select, compact -> logits of each row's last token
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.attention import attention, merge
from kernels_pallas.column_attention import column_attention
from kernels_pallas.gather_compact import gather_slots
from kernels_pallas.select import kept_indices
from kvjax import eviction
from kvjax.cache.padded import PaddedCache
from kvjax.models.decoder import Decoder, DecoderLayer, Projected
from kvjax.policies.base import Policy
from kvjax.policies.observation import Observation, State

type Rotation = tuple[Array, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """What one prefill keeps for policies that compress its full cache later; leading axis L."""

    new_positions: Int[Array, "B T"]
    queries: Float[Array, "L B H W D"] | None = None
    query_positions: Int[Array, "B W"] | None = None
    queries_pre_rope: Float[Array, "L B H T D"] | None = None
    hidden: Float[Array, "L B T E"] | None = None
    column_attention: Float[Array, "L B H T"] | None = None


def prefill(
    model: Decoder,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    budget: Int[Array, " B"],
    *,
    policy: Policy,
    capacity: int,
    params: Any = None,
) -> tuple[Float[Array, "B V"], PaddedCache]:
    """Whole prefill: every layer attends to the full prompt and leaves the layer compacted.

    One layer's full cache is alive at a time. `tokens` are right-padded; `budget` is entries per
    head and row; `capacity` is the cache's slots per head; `params` are the policy's learned
    arrays, stacked over layers. Returns the logits of each row's last token and the cache.
    """
    windows = jnp.asarray(model.windows)
    positions = _prompt_positions(tokens, lengths)
    budgets = eviction.layer_budgets(policy, budget, lengths, windows)

    def body(x: Array, inputs: Any) -> tuple[Array, Any]:
        layer, window, index, layer_budget, layer_params = inputs
        x, new, column = _attend(
            layer, x, model.rotation(positions), positions, window, policy.needs
        )
        queries = _window_queries(policy.window, new, positions, policy.needs)
        observation = _observe(
            model, layer, index, positions, lengths, policy.needs, new, queries, column
        )
        return x, _compressed_layer(
            policy, observation, layer_budget, window, capacity, layer_params
        )

    x, parts = lax.scan(
        body, model.embed(tokens), (model.layers, windows, _layer_ids(model), budgets, params)
    )
    return _last_logits(model, x, lengths), _assemble(parts, lengths)


def observe(
    model: Decoder,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    policies: tuple[Policy, ...] = (),
) -> tuple[Float[Array, "B V"], PaddedCache, Observed]:
    """One prefill for many policies: the full cache and everything they need to compress it."""
    needs = frozenset().union(*(policy.needs for policy in policies))
    width = max((policy.window for policy in policies if "queries" in policy.needs), default=0)
    windows = jnp.asarray(model.windows)
    positions = _prompt_positions(tokens, lengths)

    def body(x: Array, inputs: Any) -> tuple[Array, Any]:
        layer, window = inputs
        x, new, column = _attend(layer, x, model.rotation(positions), positions, window, needs)
        queries, query_positions = _window_queries(width, new, positions, needs)
        seen = Observed(
            new_positions=positions,
            queries=queries,
            query_positions=query_positions,
            queries_pre_rope=new.queries_pre_rope if "queries_pre_rope" in needs else None,
            hidden=new.hidden if "hidden" in needs else None,
            column_attention=column,
        )
        return x, (new.keys, new.values, seen)

    x, (keys, values, seen) = lax.scan(body, model.embed(tokens), (model.layers, windows))
    heads = keys.shape[:3]
    cache = PaddedCache(
        keys=keys,
        values=values,
        positions=jnp.broadcast_to(positions[None, :, None], (*heads, tokens.shape[1])),
        lengths=jnp.broadcast_to(lengths[None, :, None], heads),
        next_position=lengths,
        overflowed=jnp.zeros_like(lengths),
    )
    shared = {"new_positions": positions}
    if seen.query_positions is not None:
        shared["query_positions"] = seen.query_positions[0]
    return _last_logits(model, x, lengths), cache, dataclasses.replace(seen, **shared)


def compress(
    model: Decoder,
    cache: PaddedCache,
    observed: Observed,
    budget: Int[Array, " B"],
    *,
    policy: Policy,
    capacity: int,
    params: Any = None,
) -> PaddedCache:
    """The cache that `prefill` with this policy would have left, from `observe`'s full cache."""
    windows = jnp.asarray(model.windows)
    lengths = cache.next_position
    budgets = eviction.layer_budgets(policy, budget, lengths, windows)
    per_layer = {
        name: getattr(observed, name)
        for name in ("queries", "queries_pre_rope", "hidden", "column_attention")
        if name in policy.needs
    }
    query_positions = observed.query_positions
    if "queries" in per_layer:
        per_layer["queries"] = per_layer["queries"][:, :, :, -policy.window :]
        query_positions = query_positions[:, -policy.window :]

    def body(_: None, inputs: Any) -> tuple[None, Any]:
        layer, window, index, layer_budget, layer_params, keys, values, positions, seen = inputs
        observation = Observation(
            keys=keys,
            values=values,
            positions=positions,
            next_position=lengths,
            layer=index,
            rope_frequencies=jnp.asarray(model.rope_frequencies[0]),
            query_positions=query_positions if "queries" in policy.needs else None,
            new_positions=observed.new_positions,
            output_projection=(
                layer.output_projection if "output_projection" in policy.needs else None
            ),
            **seen,
        )
        return None, _compressed_layer(
            policy, observation, layer_budget, window, capacity, layer_params
        )

    inputs = (model.layers, windows, _layer_ids(model), budgets, params)
    cached = (cache.keys, cache.values, cache.positions, per_layer)
    _, parts = lax.scan(body, None, (*inputs, *cached))
    return _assemble(parts, lengths)


def prefill_chunked(
    model: Decoder,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    budget: Int[Array, " B"],
    *,
    policy: Policy,
    capacity: int,
    params: Any = None,
) -> tuple[Float[Array, "B V"], PaddedCache]:
    """Chunked prefill: each chunk attends to the evicted cache and itself, then evicts.

    Memory is capacity + chunk whatever the prompt's length. Later chunks never see what earlier
    ones evicted, so the result differs from whole prefill once the budget is exceeded.
    """
    chunk = policy.schedule.chunk
    batch, length = tokens.shape
    count = -(-length // chunk)
    padded = jnp.pad(tokens, ((0, 0), (0, count * chunk - length)))
    chunks = jnp.moveaxis(padded.reshape(batch, count, chunk), 1, 0)
    cache = empty_cache(model, batch, capacity, policy)

    def body(carry: Any, inputs: Any) -> tuple[Any, None]:
        logits, cache = carry
        start, piece = inputs
        here = jnp.clip(lengths - start, 0, chunk)
        now, cache = extend(
            model, cache, piece, here, budget=budget, policy=policy, params=params, interval=1
        )
        return (jnp.where((here > 0)[:, None], now, logits), cache), None

    starts = jnp.arange(count, dtype=jnp.int32) * chunk
    logits = jnp.zeros((batch, model.config.vocab_size), jnp.float32)
    (logits, cache), _ = lax.scan(body, (logits, cache), (starts, chunks))
    if policy.schedule.decode_interval is None:
        cache = dataclasses.replace(cache, policy_state=State())
    return logits, cache


def extend(
    model: Decoder,
    cache: PaddedCache,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    budget: Int[Array, " B"] | None = None,
    policy: Policy | None = None,
    params: Any = None,
    interval: int | None = None,
) -> tuple[Float[Array, "B V"], PaddedCache]:
    """Runs `lengths` new tokens of each row against the cache and appends them.

    One function for prefill chunks, follow-up questions and decode steps. All new tokens attend
    to every slot and causally to each other; then, where `policy` is given, rows whose mean head
    has grown to budget + `interval` entries (default: the schedule's decode interval), or whose
    tokens would not fit, are cut back to `budget`. Without a policy nothing is evicted, and
    tokens that find no slot are counted in `cache.overflowed`.

    The cache is read-only inside the layer scan and written once behind it, so a donated cache
    is updated in place. Returns the logits of each row's last new token.
    """
    if policy is None or policy.scorer is None:
        return _extend_only(model, cache, tokens, lengths)
    if budget is None:
        raise ValueError(f"extend with policy {policy.name!r} needs a budget (entries per head)")
    interval = interval or policy.schedule.decode_interval
    if interval is None:
        return _extend_only(model, cache, tokens, lengths)
    return _extend_and_evict(model, cache, tokens, lengths, budget, policy, params, interval)


def empty_cache(
    model: Decoder, batch: int, capacity: int, policy: Policy | None = None
) -> PaddedCache:
    """An empty cache for this model, with the state that `policy` keeps over calls."""
    config = model.config
    state = State()
    if policy is not None:
        slots, layer = eviction.state_fields(policy, config.num_heads, config.head_dim, model.dtype)
        rows = (config.num_layers, batch)
        state = State(
            slots=eviction.new_state(slots, (*rows, config.num_kv_heads, capacity)),
            layer=eviction.new_state(layer, rows),
        )
    return PaddedCache.empty(
        num_layers=config.num_layers,
        batch=batch,
        num_kv_heads=config.num_kv_heads,
        capacity=capacity,
        head_dim=config.head_dim,
        dtype=model.dtype,
        policy_state=state,
    )


def _extend_only(
    model: Decoder, cache: PaddedCache, tokens: Array, lengths: Array
) -> tuple[Array, PaddedCache]:
    if cache.policy_state.slots or cache.policy_state.layer:
        raise ValueError(
            "extend: this cache carries the state of a policy that evicts while decoding; pass "
            "that policy and its budget"
        )
    positions = _next_positions(cache, tokens, lengths)
    rotation = model.rotation(positions)

    def body(x: Array, inputs: Any) -> tuple[Array, Any]:
        layer, window, *cached = inputs
        x, new, _ = _attend(layer, x, rotation, positions, window, frozenset(), cached)
        return x, (new.keys, new.values)

    inputs = (model.layers, jnp.asarray(model.windows), cache.keys, cache.values, cache.positions)
    x, (keys, values) = lax.scan(body, model.embed(tokens), inputs)
    return _last_logits(model, x, lengths), cache.append(keys, values, positions, State())


def _extend_and_evict(
    model: Decoder,
    cache: PaddedCache,
    tokens: Array,
    lengths: Array,
    budget: Array,
    policy: Policy,
    params: Any,
    interval: int,
) -> tuple[Array, PaddedCache]:
    windows = jnp.asarray(model.windows)
    positions = _next_positions(cache, tokens, lengths)
    rotation = model.rotation(positions)
    next_position = cache.next_position + lengths
    count, capacity = tokens.shape[1], cache.capacity
    lead = (cache.batch, cache.keys.shape[2], count)
    budgets = jnp.minimum(eviction.layer_budgets(policy, budget, next_position, windows), capacity)
    after = cache.lengths + lengths[None, :, None]
    limit = jnp.sum(budgets + interval, axis=0) * cache.keys.shape[2]
    full = (jnp.sum(after, axis=(0, 2)) >= limit) | jnp.any(after > capacity, axis=(0, 2))
    slot_fields, _ = eviction.state_fields(
        policy, model.config.num_heads, model.config.head_dim, model.dtype
    )

    def body(x: Array, inputs: Any) -> tuple[Array, Any]:
        layer, window, index, layer_budget, layer_params, keys, values, slots, state = inputs
        cached = (keys, values, slots)
        x, new, column = _attend(layer, x, rotation, positions, window, policy.needs, cached)
        state = eviction.grow(state, slot_fields, lead)
        earlier = None
        if "queries" in policy.needs:
            earlier = (state.layer[eviction.QUERIES], state.layer[eviction.QUERY_POSITIONS])
        queries = _window_queries(policy.window, new, positions, policy.needs, earlier)
        observation = _observe(
            model,
            layer,
            index,
            positions,
            next_position,
            policy.needs,
            new,
            queries,
            column,
            cached,
        )
        state = policy.scorer.update(observation, layer_params, state)
        if "queries" in policy.needs:
            ring = {eviction.QUERIES: queries[0], eviction.QUERY_POSITIONS: queries[1]}
            state = State(slots=state.slots, layer=state.layer | ring)

        def cut() -> Array:
            seen = dataclasses.replace(observation, budget=layer_budget)
            scores = policy.scorer.score(seen, layer_params, state)
            return eviction.stay(policy, seen, scores, layer_budget, window, capacity)

        keep = lax.cond(jnp.any(full), cut, lambda: observation.valid)
        keep = jnp.where(full[:, None, None], keep, observation.valid)
        return x, (new.keys, new.values, keep, state)

    inputs = (model.layers, windows, _layer_ids(model), budgets, params)
    cached = (cache.keys, cache.values, cache.positions, cache.policy_state)
    x, (keys, values, keep, state) = lax.scan(body, model.embed(tokens), (*inputs, *cached))
    cache = lax.cond(
        jnp.any(full),
        lambda: cache.keep(keep, keys, values, positions, state),
        lambda: cache.append(keys, values, positions, state),
    )
    return _last_logits(model, x, lengths), cache


def _attend(
    layer: DecoderLayer,
    x: Float[Array, "B T E"],
    rotation: Rotation,
    positions: Int[Array, "B T"],
    window: Int[Array, ""],
    needs: frozenset[str],
    cached: Any = None,
) -> tuple[Array, Projected, Array | None]:
    """One layer over the cached slots and the new tokens; column sums where they are needed.

    `cached` is (keys, values, positions) of the layer's slots, read only: the new tokens are a
    second part, merged by log-sum-exp, so that the cache is never copied to be extended.
    """
    new = layer.project(x, *rotation)
    spread = jnp.broadcast_to(positions[:, None], (*new.keys.shape[:3],))
    out, lse = attention(new.queries, new.keys, new.values, positions, spread, window)
    if cached is not None:
        keys, values, slots = cached
        before = attention(new.queries, keys, values, positions, slots, window)
        out, lse = merge(before, (out, lse))
    column = None
    if "column_attention" in needs:
        column = column_attention(new.queries, lse, new.keys, positions, spread, window)
        if cached is not None:
            old = column_attention(new.queries, lse, keys, positions, slots, window)
            column = jnp.concatenate([old, column], axis=2)
    return layer.finish(x, out), new, column


def _window_queries(
    width: int,
    new: Projected,
    positions: Int[Array, "B T"],
    needs: frozenset[str],
    earlier: tuple[Array, Array] | None = None,
) -> tuple[Array | None, Array | None]:
    if "queries" not in needs:
        return None, None
    return eviction.last_queries(new.queries, positions, width, earlier)


def _observe(
    model: Decoder,
    layer: DecoderLayer,
    index: Int[Array, ""],
    positions: Int[Array, "B T"],
    next_position: Int[Array, " B"],
    needs: frozenset[str],
    new: Projected,
    queries: tuple[Array | None, Array | None],
    column: Array | None,
    cached: Any = None,
) -> Observation:
    """What the policy sees: cached slots, then the new tokens, and the fields it asked for."""
    keys, values = new.keys, new.values
    slots = jnp.broadcast_to(positions[:, None], (*keys.shape[:3],))
    if cached is not None:
        keys = jnp.concatenate([cached[0], keys], axis=2)
        values = jnp.concatenate([cached[1], values], axis=2)
        slots = jnp.concatenate([cached[2], slots], axis=2)
    return Observation(
        keys=keys,
        values=values,
        positions=slots,
        next_position=next_position,
        layer=index,
        rope_frequencies=jnp.asarray(model.rope_frequencies[0]),
        queries=queries[0],
        query_positions=queries[1],
        new_positions=positions,
        queries_pre_rope=new.queries_pre_rope if "queries_pre_rope" in needs else None,
        hidden=new.hidden if "hidden" in needs else None,
        column_attention=column,
        output_projection=layer.output_projection if "output_projection" in needs else None,
    )


def _compressed_layer(
    policy: Policy,
    observation: Observation,
    budget: Int[Array, " B"],
    window: Int[Array, ""],
    capacity: int,
    params: Any,
) -> tuple[Array, Array, Array, Array, State]:
    """One layer of the prompt cut to `budget`: keys, values, positions, lengths, state."""
    heads = observation.positions.shape[:2]
    state = State()
    if policy.scorer is None:
        keep = observation.valid
    else:
        observation = dataclasses.replace(observation, budget=budget)
        num_heads = observation.queries.shape[1] if observation.queries is not None else 0
        head_dim, dtype = observation.keys.shape[-1], observation.keys.dtype
        slots, layer = eviction.state_fields(policy, num_heads, head_dim, dtype)
        state = State(
            slots=eviction.new_state(slots, observation.positions.shape),
            layer=eviction.new_state(layer, heads[:1]),
        )
        state = policy.scorer.update(observation, params, state)
        scores = policy.scorer.score(observation, params, state)
        keep = eviction.stay(policy, observation, scores, budget, window, capacity)
    indices, lengths = kept_indices(keep, capacity)
    if policy.schedule.decode_interval is None:
        state = State()
    elif "queries" in policy.needs:
        ring = {
            eviction.QUERIES: observation.queries,
            eviction.QUERY_POSITIONS: observation.query_positions,
        }
        state = State(slots=state.slots, layer=state.layer | ring)
    return (
        gather_slots(observation.keys, indices),
        gather_slots(observation.values, indices),
        gather_slots(observation.positions, indices, fill=-1),
        lengths,
        State(
            slots={name: gather_slots(array, indices) for name, array in state.slots.items()},
            layer=state.layer,
        ),
    )


def _assemble(parts: Any, lengths: Int[Array, " B"]) -> PaddedCache:
    keys, values, positions, filled, state = parts
    return PaddedCache(
        keys=keys,
        values=values,
        positions=positions,
        lengths=filled,
        next_position=lengths,
        overflowed=jnp.zeros_like(lengths),
        policy_state=state,
    )


def _prompt_positions(tokens: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Int[Array, "B T"]:
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return jnp.where(place < lengths[:, None], place, -1)


def _next_positions(
    cache: PaddedCache, tokens: Int[Array, "B T"], lengths: Int[Array, " B"]
) -> Int[Array, "B T"]:
    place = _prompt_positions(tokens, lengths)
    return jnp.where(place >= 0, cache.next_position[:, None] + place, -1)


def _last_logits(
    model: Decoder, x: Float[Array, "B T E"], lengths: Int[Array, " B"]
) -> Float[Array, "B V"]:
    last = jnp.clip(lengths - 1, 0)[:, None, None]
    return model.logits(jnp.take_along_axis(x, last, axis=1)[:, 0])


def _layer_ids(model: Decoder) -> Int[Array, " L"]:
    return jnp.arange(model.config.num_layers, dtype=jnp.int32)
