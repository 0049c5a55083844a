"""One layer of a cached pass: attend to slots and new tokens, show a policy what it sees."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxtyping import Array, Float, Int

from kernels_pallas.attention import attention, causal_attention, merge
from kernels_pallas.column_attention import column_attention
from kvjax import eviction, placement, sequence_parallel
from kvjax.cache.padded import join
from kvjax.models.decoder import Adapters, Decoder, DecoderLayer, Projected
from kvjax.policies.observation import Observation
from kvjax.remembering import Read

type Rotation = tuple[Array, Array]


def attend(
    layer: DecoderLayer,
    x: Float[Array, "B T E"],
    rotation: Rotation,
    positions: Int[Array, "B T"],
    window: Int[Array, ""],
    needs: frozenset[str],
    cached: Any = None,
    read: Read | None = None,
    adapters: Adapters | None = None,
    mesh: AbstractMesh | None = None,
) -> tuple[Array, Projected, Array | None]:
    """One layer over the cached slots and the new tokens; column sums where they are needed.

    `cached` is a cache and its view of this layer, read only: the new tokens are a second part,
    merged by log-sum-exp, so that the cache is never copied to be extended. `read` adds what is
    remembered of evicted entries; column sums are of the softmax over those that are there.
    `adapters` are the layer's low-rank additions. With a `mesh` activations lie over it, and the
    tokens, a whole prompt, over its axis `sequence`.
    """
    x = placement.spread(x, mesh)
    new = layer.project(x, *rotation, adapters)
    if mesh is not None and sequence_parallel.divides(mesh):
        out, _, column = sequence_parallel.spread_attention(
            new, positions, window, mesh,
            windowed=any(layer.config.windows), column="column_attention" in needs,
        )  # fmt: skip
        return layer.finish(x, out, adapters), new, column
    entries = (new.queries, new.keys, new.values)
    spread = jnp.broadcast_to(positions[:, None], new.keys.shape[:3])
    # A token always sees itself, so a window does not matter to one alone.
    if any(layer.config.windows) and x.shape[1] > 1:
        out, lse = attention(*entries, positions, spread, window)
    else:
        out, lse = causal_attention(*entries, positions)
    column = old = None
    if cached is not None:
        cache, view = cached
        if "column_attention" in needs:
            *held, old = cache.attend_mass(view, new.queries, positions, lse, window)
        else:
            held = cache.attend(view, new.queries, positions, window)
        out, lse = merge(tuple(held), (out, lse))
    if "column_attention" in needs:
        column = column_attention(new.queries, lse, new.keys, positions, spread, window)
        if old is not None:
            column = jnp.concatenate([old, column], axis=2)
    if read is not None:
        out = read(new, out, lse)
    return layer.finish(x, out, adapters), new, column


def window_queries(
    width: int,
    new: Projected,
    positions: Int[Array, "B T"],
    needs: frozenset[str],
    earlier: tuple[Array, Array] | None = None,
) -> tuple[Array | None, Array | None]:
    if "queries" not in needs:
        return None, None
    return eviction.last_queries(new.queries, positions, width, earlier)


def observation_of(
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
    spread = jnp.broadcast_to(positions[:, None], new.keys.shape[:3])
    entries = (new.keys, new.values, spread)
    if cached is not None:
        cache, view = cached
        entries = join(cache.dense(view), entries)
    keys, values, slots = entries
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


def prompt_positions(tokens: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Int[Array, "B T"]:
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return jnp.where(place < lengths[:, None], place, -1)


def last_logits(
    model: Decoder, x: Float[Array, "B T E"], lengths: Int[Array, " B"]
) -> Float[Array, "B V"]:
    last = jnp.clip(lengths - 1, 0)[:, None, None]
    return model.logits(jnp.take_along_axis(x, last, axis=1)[:, 0])


def layer_ids(model: Decoder) -> Int[Array, " L"]:
    return jnp.arange(model.config.num_layers, dtype=jnp.int32)
