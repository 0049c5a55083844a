"""One prefill for many policies: keep the full cache and what they need, compress it later."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax import eviction, remembering, strides
from kvjax.assembly import assemble
from kvjax.cache import Cache, PaddedCache, Pages
from kvjax.layer_steps import attend, last_logits, layer_ids, prompt_positions, window_queries
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.policies.observation import Observation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """What one prefill keeps for policies that compress its full cache later.

    With a leading axis L behind the prefill, without it inside a layer.
    """

    new_positions: Int[Array, "B T"]
    queries: Float[Array, "*L B H W D"] | None = None
    query_positions: Int[Array, "B W"] | None = None
    queries_pre_rope: Float[Array, "*L B H T D"] | None = None
    hidden: Float[Array, "*L B T E"] | None = None
    column_attention: Float[Array, "*L B H T"] | None = None
    replay_scores: Float[Array, "*L B K T"] | None = None  # from `replay`, for KVzip


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
    positions = prompt_positions(tokens, lengths)

    def body(x: Array, inputs: Any) -> tuple[Array, Any]:
        layer, window = inputs
        x, new, column = attend(layer, x, model.rotation(positions), positions, window, needs)
        queries, query_positions = window_queries(width, new, positions, needs)
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
    return last_logits(model, x, lengths), cache, dataclasses.replace(seen, **shared)


def compress(
    model: Decoder,
    cache: PaddedCache,
    observed: Observed,
    budget: Int[Array, " B"],
    *,
    policy: Policy,
    capacity: int,
    pages: Pages | None = None,
    params: Any = None,
    modalities: Int[Array, "B T"] | None = None,
) -> Cache:
    """The cache that `prefill` with this policy would have left, from `observe`'s full cache."""
    remembering.check_params(policy, params, model.config)
    lengths = cache.next_position
    budgets = eviction.layer_budgets(policy, budget, lengths, model.config.num_layers)
    per_layer = {
        name: getattr(observed, name)
        for name in ("queries", "queries_pre_rope", "hidden", "column_attention")
        if name in policy.needs
    }
    replayed = None
    if "replay" in policy.needs:
        if observed.replay_scores is None:
            raise ValueError(
                f"policy {policy.name!r} needs replay_scores: run replay on observe's full cache"
            )
        replayed = observed.replay_scores
    query_positions = None
    if "queries" in per_layer:
        assert observed.query_positions is not None
        per_layer["queries"] = per_layer["queries"][:, :, :, -policy.window :]
        query_positions = observed.query_positions[:, -policy.window :]

    def body(before: Any, inputs: Any) -> tuple[Any, eviction.Kept]:
        layer, window, index, layer_budget, layer_params, *cached, seen, replay_scores = inputs
        keys, values, positions = cached
        observation = Observation(
            keys=keys,
            values=values,
            positions=positions,
            next_position=lengths,
            layer=index,
            rope_frequencies=jnp.asarray(model.rope_frequencies[0]),
            query_positions=query_positions,
            new_positions=observed.new_positions,
            output_projection=(
                layer.output_projection if "output_projection" in policy.needs else None
            ),
            **seen,
        )
        kept, before = eviction.cut_layer(
            policy, observation, layer_budget, window, capacity, layer_params,
            model.config.num_heads, replay_scores, modalities, before,
        )  # fmt: skip
        return before, kept

    inputs = (model.layers, jnp.asarray(model.windows), layer_ids(model), budgets, params)
    full = (cache.keys, cache.values, cache.positions, per_layer, replayed)
    before = strides.first(policy, model.config, cache.positions.shape[1:])
    _, kept = lax.scan(body, before, (*inputs, *full))
    return assemble(model, policy, kept, budget, lengths, capacity, pages, params)
