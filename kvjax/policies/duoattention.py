"""DuoAttention: some heads retrieve and keep everything, the others stream."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.policies.base import Allocator, Params, Protection, Scorer, StateField
from kvjax.policies.needed import needed
from kvjax.policies.observation import Observation, State
from kvjax.policies.registry import register
from kvjax.policies.rope import rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class WantedEntries(Allocator):
    """Each head gets no more than its entries of score >= 0; what they spare goes to the others.

    The heads of a layer share `budget * K` entries: level water-filling under those caps, the
    indivisible rest to the first heads that still want some. A layer within budget is kept whole.
    """

    def head_budgets(
        self,
        scores: Float[Array, "B K S"],
        valid: Bool[Array, "B K S"],
        rank: Int[Array, "B K S"],
        budget: Int[Array, " B"],
    ) -> Int[Array, "B K"]:
        wanted = jnp.sum(valid & ((scores >= 0) | (rank > 0)), axis=-1).astype(jnp.int32)
        heads = wanted.shape[-1]
        total = (budget * heads).astype(jnp.int32)
        ascending = jnp.sort(wanted, axis=-1)
        below = jnp.cumsum(ascending, axis=-1) - ascending
        share = (total[:, None] - below) // jnp.arange(heads, 0, -1, dtype=jnp.int32)[None]
        # The first cap that the level does not reach fixes the level.
        fits = share <= ascending
        first = jnp.argmax(fits, axis=-1)[:, None]
        level = jnp.take_along_axis(share, first, axis=-1)
        level = jnp.where(jnp.any(fits, axis=-1, keepdims=True), level, ascending[:, -1:])
        given = jnp.minimum(wanted, level)
        hungry = wanted > given
        spare = total - jnp.sum(given, axis=-1)
        extra = hungry & (jnp.cumsum(hungry, axis=-1) <= spare[:, None])
        held = jnp.sum(valid, axis=-1, dtype=jnp.int32)
        fits_whole = (budget >= jnp.max(held, axis=-1))[:, None]
        return jnp.where(fits_whole, held, given + extra.astype(jnp.int32))

    def largest(self, budget: int, length: int, num_layers: int, num_kv_heads: int) -> int:
        del num_layers
        return min(length, budget * num_kv_heads)


@register("duoattention")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DuoAttention(Scorer):
    """Streaming heads keep sinks and a recent window, retrieval heads the rest of the budget.

    area_h = mean over t of the cumulative attention of the head's mean query, at position
    `length` - 1, over its mean key at positions 0..t (mean over the query group): large where
    the head looks far back. Heads of small area stream. s[j] = position_j, or -1 for what a
    streaming head leaves to the retrieval heads.

    Paper: DuoAttention (arXiv 2410.10819). Defaults: half of the heads stream, 128 sinks, 256
    recent tokens, length 500.
    Deviations: no trained gates. With `params={"retrieval": float[K]}` per layer (from
    `calibrate`) the classes are the model's; without, each row takes the heads of largest area of
    each layer from the first tokens it reads (the prompt, or its first chunk) and stays with
    them. Retrieval heads whose share of the budget is smaller than the prompt keep the
    newest tokens: the budget should be at least about the retrieval share of the prompt.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"queries_pre_rope"})
    streaming_sinks: int = 128
    streaming_recent: int = 256
    sparsity: float = 0.5
    length: int = 500

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity <= 1:
            raise ValueError(f"sparsity={self.sparsity}: allowed are fractions in [0, 1]")

    def protection(self) -> Protection:
        return Protection(sinks=self.streaming_sinks, recent=self.streaming_recent)

    def allocator(self) -> Allocator:
        return WantedEntries()

    def slot_fields(self) -> dict[str, StateField]:
        return {"head_class": StateField(dtype=jnp.int8)}  # 0 undecided, 1 streams, 2 retrieves

    def update(self, observation: Observation, params: Params, state: State) -> State:
        if _has_classes(params):
            return state
        decided = jnp.where(observation.valid, state.slots["head_class"], jnp.int8(0)).max(axis=2)

        def decide() -> Int[Array, "B K"]:
            retrieval = self._retrieval_of_prompt(observation)
            chosen = jnp.where(retrieval, jnp.int8(2), jnp.int8(1))
            return jnp.where(decided > 0, decided, chosen)

        # Only a row's first call pays for the statistics.
        decided = jax.lax.cond(jnp.all(decided > 0), lambda: decided, decide)
        everywhere = jnp.broadcast_to(decided[:, :, None], observation.positions.shape)
        return dataclasses.replace(state, slots={**state.slots, "head_class": everywhere})

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        positions = observation.positions
        start = observation.next_position[:, None, None] - self.streaming_recent
        streamed = (positions < self.streaming_sinks) | (positions >= start)
        if _has_classes(params):
            retrieval = (params["retrieval"] > 0.5)[None, :, None]
        else:
            retrieval = state.slots["head_class"] == 2
        return jnp.where(retrieval | streamed, positions.astype(jnp.float32), -1.0)

    def _retrieval_of_prompt(self, observation: Observation) -> Bool[Array, "B K"]:
        queries = needed(observation.queries_pre_rope, "queries_pre_rope")
        asked = needed(observation.new_positions, "queries_pre_rope") >= 0
        keys = rotate(
            observation.keys, observation.positions, observation.rope_frequencies, inverse=True
        )
        area = attention_area(
            _mean(queries.astype(jnp.float32), asked[:, None, :, None]),
            _mean(keys, observation.valid[..., None]),
            observation.rope_frequencies,
            self.length,
        )
        kv_heads = area.shape[-1]
        kept = kv_heads - int(self.sparsity * kv_heads)
        order = jnp.argsort(-area, axis=-1, stable=True)
        return jnp.argsort(order, axis=-1, stable=True) < kept


def _has_classes(params: Params) -> bool:
    return isinstance(params, dict) and "retrieval" in params


def _mean(x: Float[Array, "B N T D"], where: Bool[Array, "B n T 1"]) -> Float[Array, "B N D"]:
    count = jnp.maximum(jnp.sum(where, axis=2).astype(jnp.float32), 1.0)
    return jnp.sum(jnp.where(where, x, 0.0), axis=2) / count


def attention_area(
    mean_queries: Float[Array, "*L H D"],
    mean_keys: Float[Array, "*L K D"],
    frequencies: Float[Array, " D/2"],
    length: int = 500,
) -> Float[Array, "*L K"]:
    """Area under the cumulative attention of mean query and key (before RoPE), per KV head."""
    *layers, kv_heads, head_dim = mean_keys.shape
    shape = (*layers, kv_heads, -1, head_dim)
    at_end = jnp.full(mean_queries.shape[:-1], length - 1, jnp.int32)
    queries = rotate(mean_queries, at_end, frequencies).reshape(shape)
    distances = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (*layers, kv_heads, length))
    keys = jnp.broadcast_to(mean_keys[..., None, :], (*layers, kv_heads, length, head_dim))
    keys = rotate(keys, distances, frequencies)
    logits = jnp.einsum("...gd,...td->...gt", queries, keys, precision="highest")
    logits = logits * (head_dim**-0.5)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.mean(jnp.cumsum(weights, axis=-1), axis=(-2, -1))


def calibrate(
    mean_queries: Float[Array, "L H D"],
    mean_keys: Float[Array, "L K D"],
    frequencies: Float[Array, " D/2"],
    *,
    sparsity: float = 0.5,
    length: int = 500,
) -> dict[str, Float[Array, "L K"]]:
    """Head classes of a whole model from mean queries and keys before RoPE over a corpus.

    The `sparsity` share of all the model's KV heads with the smallest area streams, so layers
    may differ in how many of their heads retrieve.
    """
    area = attention_area(mean_queries, mean_keys, frequencies, length)
    order = jnp.argsort(area.reshape(-1), stable=True)
    rank = jnp.argsort(order, stable=True).reshape(area.shape)
    return {"retrieval": (rank >= int(sparsity * area.size)).astype(jnp.float32)}
