"""KVzip: what the model looks at while it repeats the context is what it needs."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.policies.allocators import Global
from kvjax.policies.base import Allocator, Params, Scorer, StateField, Uniform
from kvjax.policies.observation import Observation, State
from kvjax.policies.registry import register
from kvjax.whole import check_whole

# What is fed before a chunk of the context, in the chat template of the user's turn. The later
# form ends with the last `OVERLAP` tokens of the previous chunk.
REPEAT_FIRST = "Repeat the previous context exactly."
REPEAT_LATER = "Repeat the part of the previous context exactly, starting with "
OVERLAP = 8


@register("kvzip")
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVzip(Scorer):
    """The most attention an entry gets from any token of a replay of the context.

    s[j] = max over replay queries and group heads of softmax(q K^T / sqrt(D))[j], the keys being
    the first tokens, j's chunk of the context, and the replay itself (`kvzip_chunk_scores`).
    Scores are per entry and come from the state "replay_score", which the replay after prefill
    fills; the first tokens score 1.

    Paper: KVzip (arXiv 2505.23416). Defaults: chunks of 2048, 4 first tokens, one threshold for
    all layers and heads; `uniform` keeps the same number per head. Costs two to three times the
    prefill.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"replay"})
    chunk_tokens: int = 2048
    first_tokens: int = 4
    uniform: bool = False

    def __post_init__(self) -> None:
        check_whole("chunk_tokens", self.chunk_tokens, 1)
        check_whole("first_tokens", self.first_tokens, 0)

    def allocator(self) -> Allocator:
        return Uniform() if self.uniform else Global()

    def slot_fields(self) -> dict[str, StateField]:
        return {"replay_score": StateField()}

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        del params
        positions = observation.positions
        first = (positions >= 0) & (positions < self.first_tokens)
        return jnp.where(first, 1.0, state.slots["replay_score"])


def kvzip_chunk_scores(
    queries: Float[Array, "B H R D"],
    query_positions: Int[Array, "B R"],
    replay_keys: Float[Array, "B K R D"],
    keys: Float[Array, "B K S D"],
    positions: Int[Array, "B K S"],
    chunk: Int[Array, "B 2"],
    *,
    first_tokens: int = 4,
    block: int = 128,
) -> Float[Array, "B K S"]:
    """Largest replay attention on each entry of one chunk of the context; 0 elsewhere.

    Args:
      queries, replay_keys: of the R tokens fed for this chunk, after RoPE.
      query_positions: their positions, -1 for padding.
      keys, positions: cached entries, at least the first tokens and the chunk.
      chunk: first position and end (exclusive) of the chunk, per row.
      first_tokens: how many tokens of the context every replay query sees beside the chunk.
      block: replay queries at a time; memory is B H block (S + R) floats.
    """
    batch, heads, count, head_dim = queries.shape
    kv_heads, slots = positions.shape[1:]
    groups = heads // kv_heads
    start, end = chunk[:, :1, None], chunk[:, 1:, None]
    in_chunk = (positions >= 0) & (positions >= start) & (positions < end)
    seen = in_chunk | ((positions >= 0) & (positions < first_tokens))
    grouped = queries.reshape(batch, kv_heads, groups, count, head_dim)
    size = min(block, count)

    def logits(rows: Array, against: Array) -> Float[Array, "B K G Q S"]:
        product = jnp.einsum(
            "bkgqd,bksd->bkgqs",
            rows,
            against,
            precision="highest",
            preferred_element_type=jnp.float32,
        )
        return product * head_dim**-0.5

    def visit(step: Array, best: Array) -> Array:
        first = jnp.minimum(step * size, count - size)  # the last block repeats some queries
        rows = lax.dynamic_slice_in_dim(grouped, first, size, axis=3)
        asked = lax.dynamic_slice_in_dim(query_positions, first, size, axis=1)
        held = query_positions[:, None, :]
        causal = (held >= 0) & (held <= asked[..., None])
        cached = jnp.where(seen[:, :, None, None], logits(rows, keys), -jnp.inf)
        replayed = jnp.where(causal[:, None, None], logits(rows, replay_keys), -jnp.inf)
        highest = jnp.maximum(
            jnp.max(cached, axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min),
            jnp.max(replayed, axis=-1, keepdims=True),
        )
        mass = jnp.exp(cached - highest)
        total = jnp.sum(mass, axis=-1, keepdims=True)
        total = total + jnp.sum(jnp.exp(replayed - highest), axis=-1, keepdims=True)
        weights = mass / jnp.where(total > 0, total, 1.0)
        weights = jnp.where((asked >= 0)[:, None, None, :, None], weights, 0.0)
        return jnp.maximum(best, jnp.max(weights, axis=(2, 3)))

    best = jnp.zeros((batch, kv_heads, slots), jnp.float32)
    best = lax.fori_loop(0, -(-count // size), visit, best)
    return jnp.where(in_chunk, best, 0.0)
