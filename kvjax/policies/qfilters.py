"""Q-Filters: one direction per head tells which keys the model's queries will look for."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.base import Params, Scorer
from kvjax.policies.observation import Observation, State
from kvjax.policies.registry import register


@register("qfilters")
@dataclasses.dataclass(frozen=True, kw_only=True)
class QFilters(Scorer):
    """Projection of each key onto the principal direction of its head's queries.

    s[j] = k_j . f,  f = first right singular vector of the queries, with the sign of their mean

    A key far along f has a large logit for the average query. The filters belong to a model:
    record queries, `calibrate` them, and give the policy `params={"filters": float[K, D]}` for
    each layer.

    Paper: Q-Filters (arXiv 2503.02812). Defaults: 4 sinks. Implementations that negate the
    projection store the filter with the opposite sign.
    """

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        del state
        _, kv_heads, _, head_dim = observation.keys.shape
        if not isinstance(params, dict) or "filters" not in params:
            raise ValueError(
                "policy 'qfilters' needs params={'filters': float[K, D]} for each layer; "
                "make them with kvjax.policies.qfilters.calibrate(queries)"
            )
        filters = params["filters"]
        if filters.shape != (kv_heads, head_dim):
            raise ValueError(
                f"params['filters'] has shape {filters.shape}; this layer asks for "
                f"{(kv_heads, head_dim)}"
            )
        return jnp.einsum(
            "bksd,kd->bks",
            observation.keys.astype(jnp.float32),
            filters.astype(jnp.float32),
            precision="highest",
        )


def calibrate(
    queries: Float[Array, "*L H T D"], num_kv_heads: int
) -> dict[str, Float[Array, "*L K D"]]:
    """Filters of a model from recorded queries, after RoPE as the cached keys are.

    Each query head gives its first right singular vector, pointed along the mean query; a KV
    head takes the mean over its query group.

    Raises:
      ValueError: query heads that do not divide evenly over the KV heads.
    """
    *layers, heads, tokens, head_dim = queries.shape
    if heads % num_kv_heads:
        raise ValueError(f"{heads} query heads cannot share {num_kv_heads} KV heads evenly")
    queries = queries.astype(jnp.float32)
    moments = jnp.einsum("...td,...te->...de", queries, queries, precision="highest") / tokens
    _, vectors = jnp.linalg.eigh(moments)
    principal = vectors[..., -1]
    along = jnp.sum(principal * jnp.mean(queries, axis=-2), axis=-1, keepdims=True)
    principal = jnp.where(along < 0, -principal, principal)
    grouped = principal.reshape(*layers, num_kv_heads, heads // num_kv_heads, head_dim)
    return {"filters": jnp.mean(grouped, axis=-2)}
