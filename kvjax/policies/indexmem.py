"""IndexMem: a learned indexer scores keys against the queries that come after them."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvjax.learned.indexer import (
    Activation,
    IndexerConfig,
    head_gates,
    importance,
    index_keys,
    index_queries,
)
from kvjax.policies.base import Params, Policy, Protection, Schedule, Scorer, StateField
from kvjax.policies.needed import needed
from kvjax.policies.observation import Observation, State
from kvjax.policies.registry import register
from kvjax.whole import check_whole

_DECODE_BUFFER = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexMem(Scorer):
    """The largest score that any query since the last compression gives a token's index key.

    s[t] = max_q sum_i g_i(x_q) act(u_i(q) . k(x_t))

    The indexer (`kvjax.learned.indexer`) reads hidden states and queries before RoPE, and has one
    key per token that its heads share, so a token's score is the same in every KV head of a layer.
    After a prefill the maximum is over the prompt's queries, later over the queries since entries
    last left the row. It is kept as a running maximum per entry beside the entry's index key, so
    nothing has to be buffered, and a state costs 4 (size + 1) bytes per slot.

    Paper: IndexMem (arXiv 2605.25475). Defaults: 4 sinks, uniform budgets, rescoring every 128
    generated tokens, the indexer's size and `near` as it was trained: `kvjax.load_policy` sets
    them. Deviation: pairs nearer than `near` do not count, and the newest `near` tokens, which no
    query has judged yet, are protected; near=0 is the paper's. With `stride` 4 every fourth layer
    scores and the three behind it use its scores, as in the paper's efficiency variant.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"hidden", "queries_pre_rope"})
    module: str = "indexmem-no-memory"
    path: str | None = None
    size: int | None = None
    activation: Activation = "relu"
    near: int = 8
    stride: int = 1

    def __post_init__(self) -> None:
        self.indexer  # noqa: B018 (checks its own fields)
        check_whole("stride", self.stride, 1)

    @property
    def indexer(self) -> IndexerConfig:
        return IndexerConfig(size=self.size, activation=self.activation, near=self.near)

    def protection(self) -> Protection:
        return Protection(sinks=4, recent=self.near)

    def schedule(self) -> Schedule:
        return Schedule(decode_interval=_DECODE_BUFFER)

    def for_model(self, num_heads: int, head_dim: int) -> IndexMem:
        del num_heads
        return dataclasses.replace(self, size=self.indexer.size_of(head_dim))

    def slot_fields(self) -> dict[str, StateField]:
        if self.size is None:
            raise ValueError("size=None: known for a model only, see for_model")
        return {
            "index_key": StateField(shape=(self.size,)),
            "index_score": StateField(fill=-jnp.inf),
        }

    def layer_fields(self) -> dict[str, StateField]:
        return {"index_entries": StateField(dtype=jnp.int32)}

    def update(self, observation: Observation, params: Params, state: State) -> State:
        hidden = needed(observation.hidden, "hidden")
        queries = needed(observation.queries_pre_rope, "queries_pre_rope")
        positions = needed(observation.new_positions, "hidden")
        if not isinstance(params, dict) or "wq" not in params:
            raise ValueError(
                "indexmem needs params, the indexer of this backbone: take them from "
                "kvjax.policy_params(model, policy), or train them with kvjax train"
            )
        keys = state.slots["index_key"]
        start = keys.shape[2] - positions.shape[1]  # this call's tokens are the last slots
        new = jnp.broadcast_to(
            index_keys(params, hidden)[:, None],
            (*keys.shape[:2], positions.shape[1], keys.shape[3]),
        )
        keys = lax.dynamic_update_slice_in_dim(keys, new, start, axis=2)
        found = self._importance(
            index_queries(params, queries), head_gates(params, hidden), keys, observation
        )
        # Fewer entries than the last call left: since then some were evicted (or rolled back).
        valid = observation.valid
        before = jnp.sum(valid[:, :, :start], axis=(1, 2), dtype=jnp.int32)
        compressed = before < state.layer["index_entries"]
        score = jnp.where(compressed[:, None, None], -jnp.inf, state.slots["index_score"])
        slots = {"index_key": keys, "index_score": jnp.maximum(score, found)}
        layer = {"index_entries": jnp.sum(valid, axis=(1, 2), dtype=jnp.int32)}
        return State(slots=state.slots | slots, layer=state.layer | layer)

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        del observation, params
        # Finite, for allocators that compare heads by their scores.
        return jnp.maximum(state.slots["index_score"], jnp.finfo(jnp.float32).min)

    def _importance(
        self,
        queries: Float[Array, "B I T P"],
        gates: Float[Array, "B I T"],
        keys: Float[Array, "B K S P"],
        observation: Observation,
    ) -> Float[Array, "B K S"]:
        positions, asking = observation.positions, needed(observation.new_positions, "hidden")
        heads = positions.shape[1]
        options: Any = {"activation": self.activation, "near": self.near}

        def once() -> Array:
            found = importance(queries, gates, keys[:, 0], asking, positions[:, 0], **options)
            return jnp.broadcast_to(found[:, None], positions.shape)

        def per_head() -> Array:
            found = importance(
                jnp.repeat(queries, heads, axis=0),
                jnp.repeat(gates, heads, axis=0),
                keys.reshape(-1, *keys.shape[2:]),
                jnp.repeat(asking, heads, axis=0),
                positions.reshape(-1, positions.shape[2]),
                **options,
            )
            return found.reshape(positions.shape)

        # Heads hold the same tokens unless an allocator gives them budgets of their own.
        aligned = jnp.all(positions == positions[:, :1])
        return once() if heads == 1 else lax.cond(aligned, once, per_head)


@register("indexmem-no-memory")
def indexmem_no_memory(
    path: str | None = None,
    size: int | None = None,
    activation: Activation = "relu",
    near: int = 8,
    stride: int = 1,
) -> Policy:
    """IndexMem's learned indexer without its latent memory: what is evicted is gone.

    Paper: IndexMem (arXiv 2605.25475); the score is `IndexMem`'s. The indexer is that in the
    directory `path`, else the one that ships for the backbone. `size`,
    `activation` and `near` are those it was trained with; with `stride` n every n-th layer scores
    for those behind it.
    """
    scorer = IndexMem(path=path, size=size, activation=activation, near=near, stride=stride)
    return Policy(
        name="indexmem-no-memory",
        scorer=scorer,
        protection=scorer.protection(),
        schedule=scorer.schedule(),
    )
