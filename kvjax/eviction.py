"""Eviction: grow a policy's state, judge the entries, decide which stay.

Pure functions between `kvjax.policies` and `kvjax.cache`; they know neither the model nor how
a cache stores its entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.attention import NO_WINDOW
from kernels_pallas.gather_compact import gather_slots
from kernels_pallas.select import keep_mask, kept_indices
from kvjax import remembering, strides
from kvjax.cache import Cache, modality
from kvjax.policies.base import Policy, StateField, new_state
from kvjax.policies.observation import Observation, State

QUERIES = "recent_queries"  # layer state of policies that see queries and evict more than once
QUERY_POSITIONS = "recent_query_positions"
REPLAY = "replay_score"  # slot state of policies that need a replay of the context


def state_fields(
    policy: Policy, num_heads: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> tuple[dict[str, StateField], dict[str, StateField]]:
    """The slot and layer arrays that `policy` keeps in a cache."""
    if policy.scorer is None:
        return {}, {}
    scorer = policy.scorer.for_model(num_heads, head_dim)
    slots, layer = scorer.slot_fields(), dict(scorer.layer_fields())
    if "queries" in policy.needs:
        shape = (num_heads, policy.window, head_dim)
        layer[QUERIES] = StateField(shape=shape, dtype=dtype)
        layer[QUERY_POSITIONS] = StateField(shape=(policy.window,), dtype=jnp.int32, fill=-1)
    return slots, layer | policy.remainder.layer_fields(num_heads, num_kv_heads, head_dim)


def last_queries(
    queries: Float[Array, "B H T D"],
    new_positions: Int[Array, "B T"],
    window: int,
    earlier: tuple[Float[Array, "B H W D"], Int[Array, "B W"]] | None = None,
) -> tuple[Float[Array, "B H W D"], Int[Array, "B W"]]:
    """The newest `window` queries of each row, oldest first, position -1 where there are fewer.

    `new_positions` is -1 for padding behind the row's tokens; `earlier` are the newest queries of
    the calls before.
    """
    count = jnp.sum(new_positions >= 0, axis=1, dtype=jnp.int32)
    place = count[:, None] - window + jnp.arange(window, dtype=jnp.int32)[None]  # [B, W]
    here = jnp.clip(place, 0, queries.shape[2] - 1)
    found = jnp.take_along_axis(queries, here[:, None, :, None], axis=2)
    position = jnp.where(place >= 0, jnp.take_along_axis(new_positions, here, axis=1), -1)
    if earlier is None:
        return found, position
    before = jnp.clip(window + place, 0, window - 1)
    old_queries = jnp.take_along_axis(earlier[0], before[:, None, :, None], axis=2)
    old_position = jnp.take_along_axis(earlier[1], before, axis=1)
    is_new = place >= 0
    return (
        jnp.where(is_new[:, None, :, None], found, old_queries),
        jnp.where(is_new, position, old_position),
    )


def layer_budgets(
    policy: Policy, budget: Int[Array, " B"], lengths: Int[Array, " B"], num_layers: int
) -> Int[Array, "L B"]:
    """Mean entries per head of each layer that the allocator plans before any score."""
    return policy.allocator.layer_budgets(budget, lengths, num_layers)


def due(
    cache: Cache,
    added: Int[Array, " B"],
    budgets: Int[Array, "L B"],
    windows: Int[Array, " L"],
    interval: int,
) -> Bool[Array, " B"]:
    """Rows to cut after `added` tokens.

    Those whose heads hold on average `interval` entries above the budget, or in which a head
    would hold more than it can.
    """
    after = cache.lengths + added[None, :, None]
    local = _local(windows)[:, None]
    allowed = jnp.maximum(budgets, local) + interval
    # A sliding-window layer that does not fill its window lends no places to the others.
    held = jnp.sum(after, axis=2) // cache.num_kv_heads
    allowed = jnp.where(local > 0, jnp.minimum(allowed, held), allowed)
    too_many = jnp.sum(after, axis=(0, 2)) >= jnp.sum(allowed, axis=0) * cache.num_kv_heads
    return too_many | jnp.any(after > cache.capacity, axis=(0, 2))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a policy says of a layer's entries; with a leading axis L, of all of them."""

    scores: Float[Array, "*L B K S"]
    rank: Int[Array, "*L B K S"]  # of the protection, 0 for unprotected entries
    preference: Float[Array, "*L B"]  # what the layer tells an allocator that crosses layers


def judge(
    policy: Policy,
    observation: Observation,
    budget: Int[Array, " B"],
    window: Int[Array, ""],
    params: Any,
    state: State,
) -> Verdict:
    """Scores and protection of one layer. In a sliding-window layer its window is protected."""
    assert policy.scorer is not None
    positions, next_position = observation.positions, observation.next_position
    budgets = jnp.broadcast_to(budget[:, None], positions.shape[:2])
    rank = policy.protection.rank(positions, next_position, budgets)
    in_window = (positions >= 0) & (positions >= next_position[:, None, None] - window)
    newest = jnp.where(in_window, positions + 1, 0)
    return Verdict(
        scores=policy.scorer.score(observation, params, state).astype(jnp.float32),
        rank=jnp.where(window < NO_WINDOW, newest, rank),
        preference=policy.allocator.preference(observation),
    )


def no_verdict(positions: Int[Array, "B K S"]) -> Verdict:
    """A verdict of the right shapes, for calls in which nothing is cut."""
    return Verdict(
        scores=jnp.zeros(positions.shape, jnp.float32),
        rank=jnp.zeros(positions.shape, jnp.int32),
        preference=jnp.zeros(positions.shape[0], jnp.float32),
    )


def stay(
    policy: Policy,
    verdict: Verdict,
    valid: Bool[Array, "L B K S"],
    budget: Int[Array, " B"],
    lengths: Int[Array, " B"],
    windows: Int[Array, " L"],
    capacity: int,
) -> Bool[Array, "L B K S"]:
    """Which entries of every layer stay, given all scores."""
    heads = policy.allocator.allocate(
        verdict.scores, valid, verdict.rank, budget, lengths, verdict.preference
    )
    heads = jnp.clip(jnp.maximum(heads, _local(windows)[:, None, None]), 1, capacity)
    return keep_mask(verdict.scores, verdict.rank, valid, heads)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """What layers keep of a prompt, compacted to C slots; with a leading axis L, all of them."""

    keys: Float[Array, "*L B K C D"]
    values: Float[Array, "*L B K C D"]
    positions: Int[Array, "*L B K C"]
    lengths: Int[Array, "*L B K"]
    state: State
    verdict: Verdict | None  # of the candidates, where the allocator crosses layers


def cut_layer(
    policy: Policy,
    observation: Observation,
    budget: Int[Array, " B"],
    window: Int[Array, ""],
    capacity: int,
    params: Any,
    num_heads: int,
    replay_scores: Float[Array, "B K S"] | None = None,
    modalities: Int[Array, "B S"] | None = None,
    before: State | None = None,
) -> tuple[Kept, State | None]:
    """One layer of the prompt cut to a mean of `budget` entries per head, at most `capacity`.

    Where the allocator crosses layers, each head keeps its best `capacity` entries as candidates.
    `modalities` of the tokens go along with the kept entries and into no score. `before` is what
    the layer before has returned beside its entries (`kvjax.strides`).
    """
    valid, state, verdict = observation.valid, State(), None
    keys, values = observation.keys, observation.values
    if policy.scorer is None:
        keep = valid
    else:
        observation = dataclasses.replace(observation, budget=budget)
        params, memory_params = policy.split(params)
        state = with_queries(_first_state(policy, observation, num_heads), observation)
        if replay_scores is not None:
            state = State(slots=state.slots | {REPLAY: replay_scores}, layer=state.layer)
        state, before = strides.update(policy, observation, params, state, before)
        verdict = judge(policy, observation, budget, window, params, state)
        if policy.allocator.crosses_layers:
            heads = jnp.full(valid.shape[:2], capacity, jnp.int32)
        else:
            heads = policy.allocator.head_budgets(verdict.scores, valid, verdict.rank, budget)
            heads = jnp.clip(jnp.maximum(heads, _local(window)), 1, capacity)
        keep = keep_mask(verdict.scores, verdict.rank, valid, heads)
        if not policy.allocator.crosses_layers:
            keys, values = policy.remainder.apply(
                keys, values, observation.positions, keep, verdict.scores
            )
        if policy.remembers:
            memory = remembering.remember(
                policy, memory_params, state.memory, observation.keys, observation.values,
                observation.positions, keep, window, observation.rope_frequencies, aligned=True,
            )  # fmt: skip
            state = State(slots=state.slots, layer=state.layer | memory)
    indices, lengths = kept_indices(keep, capacity)
    state = modality.of_prompt(state, modalities, keep.shape[1])
    state = State(
        slots={name: gather_slots(array, indices) for name, array in state.slots.items()},
        layer=state.layer,
    )
    if verdict is not None:
        verdict = dataclasses.replace(
            verdict,
            scores=gather_slots(verdict.scores, indices),
            rank=gather_slots(verdict.rank, indices),
        )
    kept = Kept(
        keys=gather_slots(keys, indices),
        values=gather_slots(values, indices),
        positions=gather_slots(observation.positions, indices, fill=-1),
        lengths=lengths,
        state=state,
        verdict=verdict if policy.allocator.crosses_layers else None,
    )
    return kept, before


def cut_candidates(
    policy: Policy,
    candidates: Kept,
    budget: Int[Array, " B"],
    lengths: Int[Array, " B"],
    windows: Int[Array, " L"],
    capacity: int,
    params: Any,
    rope_frequencies: Float[Array, " half"],
) -> Kept:
    """The final cut over all layers' candidates; evicted candidates meet the remainder here.

    A memory has met those that were no candidates in `cut_layer`, the first step of this cut.
    """
    assert candidates.verdict is not None
    valid = candidates.positions >= 0
    keep = stay(policy, candidates.verdict, valid, budget, lengths, windows, capacity)

    def one_layer(_: None, inputs: Any) -> tuple[None, Kept]:
        layer, stays, window, memory_params = inputs
        assert layer.verdict is not None
        keys, values = policy.remainder.apply(
            layer.keys, layer.values, layer.positions, stays, layer.verdict.scores
        )
        memory = layer.state.memory
        if policy.remembers:
            memory = remembering.remember(
                policy, memory_params, memory, layer.keys, layer.values, layer.positions,
                stays, window, rope_frequencies, decays=False,
            )  # fmt: skip
        indices, count = kept_indices(stays, capacity)
        slots = {name: gather_slots(a, indices) for name, a in layer.state.slots.items()}
        return None, dataclasses.replace(
            layer,
            keys=gather_slots(keys, indices),
            values=gather_slots(values, indices),
            positions=gather_slots(layer.positions, indices, fill=-1),
            lengths=count,
            state=State(slots=slots, layer=layer.state.layer | memory),
        )

    remembered = (windows, policy.split(params)[1]) if policy.remembers else (None, None)
    inputs = (candidates, keep, *remembered)
    return lax.scan(one_layer, None, inputs)[1]


def capacity_for(
    policy: Policy,
    budget: int,
    length: int,
    windows: Sequence[int],
    num_kv_heads: int,
    room: int = 0,
) -> int:
    """Slots per head that a padded cache needs.

    The largest share of the budget that one head can get, no sliding-window layer below its
    window, never more than the prompt, plus `room` for tokens appended beside the budget, or the
    tau - 1 that a decode interval of tau lets a row grow by.
    """
    interval = policy.schedule.decode_interval
    if policy.scorer is None:
        return length + room
    largest = policy.allocator.largest(budget, length, len(windows), num_kv_heads)
    local = max((w for w in windows if w < NO_WINDOW), default=0)
    needed = max(largest, local)
    if interval is not None:
        return needed + interval - 1
    return min(needed, length) + room


def grow(state: State, slots: dict[str, StateField], lead: Sequence[int]) -> State:
    """`state` with fresh slots for new tokens behind the cached ones; `lead` is (B, K, T)."""
    fresh = new_state(slots, lead)
    grown = {name: jnp.concatenate([state.slots[name], fresh[name]], axis=2) for name in fresh}
    return State(slots=grown, layer=state.layer)


def earlier_queries(state: State) -> tuple[Array, Array] | None:
    """The newest queries of the calls before, where the policy's state has them."""
    if QUERIES not in state.layer:
        return None
    return state.layer[QUERIES], state.layer[QUERY_POSITIONS]


def with_queries(state: State, observation: Observation) -> State:
    """`state` with this call's newest queries in place of the earlier ones."""
    if QUERIES not in state.layer:
        return state
    assert observation.queries is not None and observation.query_positions is not None
    newest = {QUERIES: observation.queries, QUERY_POSITIONS: observation.query_positions}
    return State(slots=state.slots, layer=state.layer | newest)


def _first_state(policy: Policy, observation: Observation, num_heads: int) -> State:
    """The state of a layer before its first call, with slots for all of its tokens."""
    head_dim, dtype = observation.keys.shape[-1], observation.keys.dtype
    shape = observation.positions.shape
    slots, layer = state_fields(policy, num_heads, shape[1], head_dim, dtype)
    return State(slots=new_state(slots, shape), layer=new_state(layer, shape[:1]))


def _local(windows: Int[Array, "*L"]) -> Int[Array, "*L"]:
    """The window of sliding-window layers, 0 for the others."""
    return jnp.where(windows < NO_WINDOW, windows, 0)
