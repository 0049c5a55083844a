"""Random observations of one layer whose optional fields agree with one another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from kvjax.policies.observation import Observation


def rope_frequencies(head_dim: int, base: float = 1e4) -> np.ndarray:
    """[D/2] radians per position."""
    return base ** (-np.arange(0, head_dim, 2) / head_dim)


def rotate(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """RoPE in the half-split layout: x [..., D] at positions [...]."""
    angles = positions[..., None] * frequencies
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(
    queries: np.ndarray, query_positions: np.ndarray, keys: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """Weights [H, Q, S] of one row: queries [H, Q, D] at [Q], keys [K, S, D] at [K, S]."""
    groups = queries.shape[0] // keys.shape[0]
    keys, positions = np.repeat(keys, groups, axis=0), np.repeat(positions, groups, axis=0)
    logits = np.einsum("hqd,hsd->hqs", queries, keys) / np.sqrt(queries.shape[-1])
    visible = (positions[:, None, :] >= 0) & (positions[:, None, :] <= query_positions[:, None])
    highest = np.max(np.where(visible, logits, -np.inf), axis=-1, keepdims=True, initial=-1e30)
    mass = np.where(visible, np.exp(np.where(visible, logits - highest, 0.0)), 0.0)
    total = mass.sum(-1, keepdims=True)
    return mass / np.where(total > 0, total, 1.0)


def make_observation(
    seed: int,
    *,
    batch: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    slots: int = 24,
    head_dim: int = 8,
    hidden_size: int = 16,
    window: int = 4,
    lengths: Sequence[int] | None = None,
    dtype: object = jnp.float32,
    cached: int = 0,
    holes: float = 0.0,
    layer: int = 3,
) -> Observation:
    """An observation with every optional field filled.

    The first `cached` slots hold, per row and KV head, a different sorted subset of
    `2 * cached` earlier tokens; the other `slots - cached` slots are this call's tokens, of which
    row b really has `lengths[b]` (default: all) and the rest is padding at the end. `holes` is
    the fraction of slots emptied at random (the newest token's slot stays). Empty slots and
    padding hold ordinary random numbers: `with_garbage` makes them hostile. The window is filled
    from this call's queries only.
    """
    rng = np.random.default_rng(seed)
    tokens = slots - cached
    lengths = np.full(batch, tokens) if lengths is None else np.asarray(lengths)
    past = 2 * cached
    frequencies = rope_frequencies(head_dim)

    def rounded(x: np.ndarray) -> np.ndarray:
        return np.asarray(jnp.asarray(x, dtype=dtype).astype(jnp.float32), np.float64)

    everything = rng.normal(size=(batch, past + tokens, hidden_size))
    to_query = rng.normal(size=(num_heads, hidden_size, head_dim)) / np.sqrt(hidden_size) * 1.5
    to_key = rng.normal(size=(num_kv_heads, hidden_size, head_dim)) / np.sqrt(hidden_size) * 1.5
    to_value = rng.normal(size=(num_kv_heads, hidden_size, head_dim)) / np.sqrt(hidden_size)
    bias = rng.normal(size=(num_kv_heads, 1, head_dim))  # keys of real heads share a direction
    all_positions = np.arange(past + tokens)

    keys = np.einsum("bte,ked->bktd", everything, to_key) + bias
    keys = rounded(rotate(keys, all_positions, frequencies))
    values = rounded(np.einsum("bte,ked->bktd", everything, to_value))

    positions = np.full((batch, num_kv_heads, slots), -1)
    for b in range(batch):
        for k in range(num_kv_heads):
            positions[b, k, :cached] = np.sort(rng.permutation(past)[:cached])
            positions[b, k, cached : cached + lengths[b]] = past + np.arange(lengths[b])
            empty = rng.random(slots) < holes
            empty[cached + lengths[b] - 1] = False
            positions[b, k, empty] = -1
    source = np.where(positions >= 0, positions, 0)[..., None]
    keys, values = (np.take_along_axis(x, source, axis=2) for x in (keys, values))
    is_empty = (positions < 0)[..., None]
    keys = np.where(is_empty, rounded(rng.normal(size=keys.shape)), keys)
    values = np.where(is_empty, rounded(rng.normal(size=values.shape)), values)

    hidden = rounded(everything[:, past:])
    queries_pre_rope = rounded(np.einsum("bte,hed->bhtd", hidden, to_query))
    queries_post_rope = rounded(rotate(queries_pre_rope, all_positions[past:], frequencies))
    new_positions = np.where(np.arange(tokens) < lengths[:, None], past + np.arange(tokens), -1)
    window_queries = rounded(rng.normal(size=(batch, num_heads, window, head_dim)))
    query_positions = np.full((batch, window), -1)
    column_attention = np.zeros((batch, num_heads, slots))
    for b in range(batch):
        seen = min(window, lengths[b])
        if seen:
            last = slice(lengths[b] - seen, lengths[b])
            window_queries[b, :, window - seen :] = queries_post_rope[b, :, last]
            query_positions[b, window - seen :] = new_positions[b, last]
        column_attention[b] = attention(
            queries_post_rope[b], new_positions[b], keys[b], positions[b]
        ).sum(1)
    output_projection = rng.normal(size=(num_heads, head_dim, hidden_size)) / np.sqrt(
        num_heads * head_dim
    )

    def array(x: np.ndarray) -> jnp.ndarray:
        return jnp.asarray(x, dtype=dtype)

    def integers(x: np.ndarray) -> jnp.ndarray:
        return jnp.asarray(x, dtype=jnp.int32)

    return Observation(
        keys=array(keys),
        values=array(values),
        positions=integers(positions),
        next_position=integers(past + lengths),
        layer=jnp.int32(layer),
        rope_frequencies=jnp.asarray(frequencies, dtype=jnp.float32),
        queries=array(window_queries),
        query_positions=integers(query_positions),
        new_positions=integers(new_positions),
        queries_pre_rope=array(queries_pre_rope),
        hidden=array(hidden),
        column_attention=jnp.asarray(column_attention, dtype=jnp.float32),
        output_projection=array(output_projection),
    )


def one_call(observation: Observation, begin: int, end: int) -> Observation:
    """What the call that reads tokens begin..end-1 of the prompt shows, nothing being evicted.

    For observations with `cached=0`. Queries and column attention, which the call would have to
    compute anew, are None.
    """
    tokens = slice(begin, end)
    return dataclasses.replace(
        observation,
        keys=observation.keys[:, :, :end],
        values=observation.values[:, :, :end],
        positions=observation.positions[:, :, :end],
        next_position=jnp.minimum(observation.next_position, end),
        queries=None,
        query_positions=None,
        new_positions=observation.new_positions[:, tokens],
        queries_pre_rope=observation.queries_pre_rope[:, :, tokens],
        hidden=observation.hidden[:, tokens],
        column_attention=None,
    )


def one_row(observation: Observation, row: int) -> Observation:
    """The same observation with a batch of one."""
    shared = {"layer", "rope_frequencies", "output_projection"}
    return dataclasses.replace(
        observation,
        **{
            field.name: getattr(observation, field.name)[row : row + 1]
            for field in dataclasses.fields(observation)
            if field.name not in shared and getattr(observation, field.name) is not None
        },
    )


def mirror(observation: Observation, row: int) -> SimpleNamespace:
    """One row in NumPy, float64 and int64, without the batch axis."""
    single = one_row(observation, row)
    shared = {"layer", "rope_frequencies", "output_projection"}
    fields = {}
    for field in dataclasses.fields(single):
        value = getattr(single, field.name)
        if value is None:
            fields[field.name] = None
            continue
        integral = jnp.issubdtype(value.dtype, jnp.integer)
        plain = np.asarray(value if integral else value.astype(jnp.float32))
        plain = plain.astype(np.int64 if integral else np.float64)
        fields[field.name] = plain if field.name in shared else plain[0]
    return SimpleNamespace(**fields)


def with_garbage(observation: Observation, value: float = 1e4) -> Observation:
    """The same observation with `value` in every empty slot and every padded token."""
    empty = (observation.positions < 0)[..., None]
    padded = observation.new_positions < 0
    unseen = (observation.query_positions < 0)[:, None, :, None]

    def fill(x: jnp.ndarray, where: jnp.ndarray) -> jnp.ndarray:
        return jnp.where(where, jnp.asarray(value, dtype=x.dtype), x)

    return dataclasses.replace(
        observation,
        keys=fill(observation.keys, empty),
        values=fill(observation.values, empty),
        queries=fill(observation.queries, unseen),
        queries_pre_rope=fill(observation.queries_pre_rope, padded[:, None, :, None]),
        hidden=fill(observation.hidden, padded[..., None]),
    )
