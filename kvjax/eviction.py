"""Eviction in one layer: grow a policy's state, score the entries, decide which stay.

Pure functions between `kvjax.policies` and `kvjax.cache`; they know neither the model nor how
the cache is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.attention import NO_WINDOW
from kernels_pallas.select import keep_mask
from kvjax.policies.base import Policy, StateField
from kvjax.policies.observation import Observation, State

QUERIES = "recent_queries"  # layer state of policies that see queries and evict more than once
QUERY_POSITIONS = "recent_query_positions"


def state_fields(
    policy: Policy, num_heads: int, head_dim: int, dtype: jnp.dtype
) -> tuple[dict[str, StateField], dict[str, StateField]]:
    """The slot and layer arrays that `policy` keeps in a cache."""
    if policy.scorer is None:
        return {}, {}
    slots, layer = policy.scorer.slot_fields(), dict(policy.scorer.layer_fields())
    if "queries" in policy.needs:
        shape = (num_heads, policy.window, head_dim)
        layer[QUERIES] = StateField(shape=shape, dtype=dtype)
        layer[QUERY_POSITIONS] = StateField(shape=(policy.window,), dtype=jnp.int32, fill=-1)
    return slots, layer


def new_state(fields: dict[str, StateField], lead: Sequence[int]) -> dict[str, Array]:
    """Arrays of the given fields at their fill value, with leading axes `lead`."""
    return {
        name: jnp.full((*lead, *field.shape), field.fill, field.dtype)
        for name, field in fields.items()
    }


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
    policy: Policy,
    budget: Int[Array, " B"],
    lengths: Int[Array, " B"],
    windows: Int[Array, " L"],
) -> Int[Array, "L B"]:
    """Mean entries per head of each layer; a sliding-window layer never gets less than its window."""
    budgets = policy.allocator.layer_budgets(budget, lengths, windows.shape[0])
    local = jnp.where(windows < NO_WINDOW, windows, 0)[:, None]
    return jnp.maximum(budgets, local)


def protected_rank(
    policy: Policy,
    observation: Observation,
    budget: Int[Array, " B"],
    window: Int[Array, ""],
) -> Int[Array, "B K S"]:
    """The protection's rank; in a sliding-window layer the whole window is protected."""
    positions, next_position = observation.positions, observation.next_position
    budgets = jnp.broadcast_to(budget[:, None], positions.shape[:2])
    rank = policy.protection.rank(positions, next_position, budgets)
    in_window = positions >= next_position[:, None, None] - window
    is_local = (window < NO_WINDOW) & in_window & (positions >= 0)
    return jnp.where(is_local, jnp.maximum(rank, positions + 1), rank)


def stay(
    policy: Policy,
    observation: Observation,
    scores: Float[Array, "B K S"],
    budget: Int[Array, " B"],
    window: Int[Array, ""],
    capacity: int,
) -> Bool[Array, "B K S"]:
    """Which entries of one layer stay under a mean of `budget` per head, at most `capacity`."""
    rank = protected_rank(policy, observation, budget, window)
    heads = policy.allocator.head_budgets(scores, observation.valid, rank, budget)
    heads = jnp.clip(heads, 1, capacity)
    return keep_mask(scores, rank, observation.valid, heads)


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
