"""Compactor: outliers among the keys, blended with attention that ignores causality."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.policies.base import Params, Protection, StateField
from kvjax.policies.leverage import LeverageScore
from kvjax.policies.needed import needed
from kvjax.policies.observation import Observation, State
from kvjax.policies.registry import register
from kvjax.policies.rope import rotate
from kvjax.whole import check_whole


@register("compactor")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Compactor(LeverageScore):
    """Leverage of the key plus the attention it gets from its whole chunk, earlier tokens too.

    s[j] = z(leverage)[j] + blend * z(a)[j],
    a[j] = mean over group of sum over i in chunk(j) of softmax_chunk(q_i K^T / sqrt(D))[j]

    Queries and keys are taken before RoPE; z standardises over the head's entries. No entry needs
    a question or a later token to be judged, and later queries do not vote.

    Paper: Compactor (arXiv 2507.08143), written from its description. Defaults: chunks of 256,
    blend 0.35, exact leverage, sinks 8, recent 4.
    Deviations: exact leverage instead of a sketch; `blend` is a constant and does not follow the
    compression ratio; entries judged in an earlier call keep their attention score.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"queries_pre_rope"})
    chunk_size: int = 256
    blend: float = 0.35

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("chunk_size", self.chunk_size, 1)

    def protection(self) -> Protection:
        return Protection(sinks=8, recent=4)

    def slot_fields(self) -> dict[str, StateField]:
        return {"chunk_attention": StateField()}

    def update(self, observation: Observation, params: Params, state: State) -> State:
        del params
        queries = needed(observation.queries_pre_rope, "queries_pre_rope")
        tokens = queries.shape[2]
        positions = observation.positions[:, :, -tokens:]
        keys = rotate(
            observation.keys[:, :, -tokens:],
            positions,
            observation.rope_frequencies,
            inverse=True,
        )
        received = _chunk_attention(
            queries,
            keys,
            needed(observation.new_positions, "queries_pre_rope") >= 0,
            positions >= 0,
            min(self.chunk_size, tokens),
        )
        earlier = state.slots["chunk_attention"][:, :, :-tokens]
        received = jnp.concatenate([earlier, received], axis=-1)
        return dataclasses.replace(state, slots={**state.slots, "chunk_attention": received})

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        outlier = _standardised(super().score(observation, params, state), observation.valid)
        received = _standardised(state.slots["chunk_attention"], observation.valid)
        return outlier + self.blend * received


def _standardised(
    scores: Float[Array, "B K S"], valid: Bool[Array, "B K S"]
) -> Float[Array, "B K S"]:
    count = jnp.maximum(jnp.sum(valid, axis=-1, keepdims=True).astype(jnp.float32), 1.0)
    mean = jnp.sum(jnp.where(valid, scores, 0.0), axis=-1, keepdims=True) / count
    centred = jnp.where(valid, scores - mean, 0.0)
    deviation = jnp.sqrt(jnp.sum(centred * centred, axis=-1, keepdims=True) / count)
    return centred / jnp.maximum(deviation, 1e-6)


def _chunk_attention(
    queries: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    asked: Bool[Array, "B T"],
    held: Bool[Array, "B K T"],
    chunk: int,
) -> Float[Array, "B K T"]:
    batch, heads, tokens, head_dim = queries.shape
    kv_heads = keys.shape[1]
    chunks = -(-tokens // chunk)
    surplus = chunks * chunk - tokens

    def split(x: Array, axis: int) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, surplus)
        shape = (*x.shape[:axis], chunks, chunk, *x.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(x, widths).reshape(shape), axis, 0)

    def one(inputs: tuple[Array, Array, Array, Array]) -> Array:
        q, k, q_there, k_there = inputs
        q = q.reshape(batch, kv_heads, -1, head_dim)
        logits = jnp.einsum("bkqd,bksd->bkqs", q, k, precision="highest") * (head_dim**-0.5)
        logits = jnp.where(k_there[:, :, None], logits, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(logits, axis=-1)
        votes = jnp.tile(q_there, (1, heads // kv_heads))[:, None, :, None]
        total = jnp.sum(jnp.where(votes, weights, 0.0), axis=2) / (heads // kv_heads)
        return jnp.where(k_there, total, 0.0)

    queries = queries.astype(jnp.float32)
    received = jax.lax.map(
        one, (split(queries, 2), split(keys, 2), split(asked, 1), split(held, 2))
    )
    return jnp.moveaxis(received, 0, 2).reshape(batch, kv_heads, -1)[:, :, :tokens]
