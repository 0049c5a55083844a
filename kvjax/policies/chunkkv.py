"""ChunkKV: whole chunks of neighbouring tokens stay or go together."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.policies.base import Params
from kvjax.policies.observation import Observation, State
from kvjax.policies.registry import register
from kvjax.policies.sharing import sum_over_heads
from kvjax.policies.snapkv import SnapKV
from kvjax.whole import check_whole


@register("chunkkv")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkKV(SnapKV):
    """SnapKV's scores, summed over KV heads and averaged inside chunks of the text.

    s[j] = mean of sum over heads of snapkv[i], over the entries i of j's chunk

    Chunks are fixed by position (token t belongs to chunk t // chunk_size) and end where the
    observation window begins. All heads of a layer share the scores.

    Paper: ChunkKV (arXiv 2502.00299). Defaults: chunks of 10, SnapKV's window 32 and pooling 5.
    Deviations: the budget is filled exactly, so the last kept chunk may be cut; no reuse of
    indices between layers.
    """

    chunk_size: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("chunk_size", self.chunk_size, 1)

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        scores = super().score(observation, params, state)
        scores = sum_over_heads(scores, observation.positions)
        start = observation.next_position[:, None, None] - self.window
        in_window = (observation.positions >= start).astype(jnp.int32)
        chunk = observation.positions // self.chunk_size * 2 + in_window
        chunk = jnp.where(observation.valid, chunk, -1)
        return jax.vmap(jax.vmap(_mean_of_runs))(scores, chunk)


def _mean_of_runs(scores: Float[Array, " S"], chunk: Int[Array, " S"]) -> Float[Array, " S"]:
    """Mean over the entries of each chunk; chunk numbers ascend, -1 marks empty slots."""
    ordered = jax.lax.cummax(chunk)
    run = jnp.cumsum(ordered != jnp.concatenate([ordered[:1], ordered[:-1]]))
    counted = (chunk >= 0).astype(jnp.float32)
    total = jax.ops.segment_sum(scores * counted, run, num_segments=scores.size)
    count = jax.ops.segment_sum(counted, run, num_segments=scores.size)
    return (total / jnp.maximum(count, 1.0))[run]
