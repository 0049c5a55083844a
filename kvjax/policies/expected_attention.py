"""Expected Attention: what queries not yet asked will attend to."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.removal_error.blockwise import by_slot_blocks
from kvjax.policies.base import Params, Protection, Scorer
from kvjax.policies.needed import needed
from kvjax.policies.observation import Observation, State
from kvjax.policies.reconstruction import value_norms
from kvjax.policies.registry import register
from kvjax.whole import check_whole


@register("expected-attention")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Scorer):
    """Attention that a Gaussian of future queries would pay, times the size of the value.

    mu, S: mean and covariance of the queries before RoPE, the first `skipped` tokens left out;
    R: mean rotation over the next `horizon` positions.

        z_j = (R mu) . k_j / sqrt(D) + k_j^T (R S R^T) k_j / (2 D)
        s[j] = (mean over group of softmax_j z + epsilon) ||v_j||_2

    Paper: Expected Attention (arXiv 2510.00636). Defaults: horizon 512, covariance and value
    norm on, epsilon 0, 4 sinks, which take no part in the softmax. The covariance divides by the
    number of queries. In chunked prefill and at decode the statistics are those of the call's
    own tokens. Without any such query all entries are expected alike.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"queries_pre_rope"})
    horizon: int = 512
    skipped: int = 4
    use_covariance: bool = True
    use_vnorm: bool = True
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_whole("horizon", self.horizon, 1)
        check_whole("skipped", self.skipped, 0)
        if self.epsilon < 0:
            raise ValueError(f"epsilon={self.epsilon}: allowed are numbers >= 0")

    def protection(self) -> Protection:
        return Protection(sinks=self.skipped)

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        del params, state
        valid = observation.valid
        batch, kv_heads, slots = valid.shape
        head_dim = observation.keys.shape[-1]
        mean, covariance = query_statistics(
            needed(observation.queries_pre_rope, "queries_pre_rope"),
            needed(observation.new_positions, "queries_pre_rope") >= self.skipped,
            self.use_covariance,
        )
        rotation = mean_rotation(
            observation.next_position, observation.rope_frequencies, self.horizon
        )
        rotated = jnp.einsum("bij,bhj->bhi", rotation, mean, precision="highest")
        rotated = rotated.reshape(batch, kv_heads, -1, head_dim) * head_dim**-0.5
        if covariance is not None:
            turned = jnp.einsum(
                "bij,bhjl,bml->bhim", rotation, covariance, rotation, precision="highest"
            )
            turned = turned.reshape(batch, kv_heads, -1, head_dim, head_dim) / (2 * head_dim)
        groups = rotated.shape[2]

        def part(start: Array, size: int) -> Array:
            keys = jax.lax.dynamic_slice_in_dim(observation.keys, start, size, axis=2)
            keys = keys.astype(jnp.float32)
            logits = jnp.einsum("bkgd,bksd->bkgs", rotated, keys, precision="highest")
            if covariance is not None:
                spread = [
                    jnp.sum(jnp.matmul(keys, turned[:, :, g], precision="highest") * keys, axis=-1)
                    for g in range(groups)
                ]
                logits = logits + jnp.stack(spread, axis=2)
            return logits

        logits = by_slot_blocks(
            part, slots, jnp.zeros((batch, kv_heads, groups, slots), jnp.float32)
        )
        expected = (valid & (observation.positions >= self.skipped))[:, :, None]
        logits = jnp.where(expected, logits, -jnp.inf)
        highest = jnp.max(logits, axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min)
        mass = jnp.exp(logits - highest)
        total = jnp.sum(mass, axis=-1, keepdims=True)
        scores = jnp.mean(mass / jnp.where(total > 0, total, 1.0), axis=2) + self.epsilon
        if self.use_vnorm:
            scores = scores * value_norms(observation.values, valid)
        return jnp.where(valid, scores, 0.0)


def query_statistics(
    queries: Float[Array, "B H T D"], counted: Array, use_covariance: bool
) -> tuple[Float[Array, "B H D"], Float[Array, "B H D D"] | None]:
    """Mean and (biased) covariance of the counted [B, T] queries of each head; 0 without any."""
    share = counted.astype(jnp.float32)
    share = share / jnp.maximum(jnp.sum(share, axis=1, keepdims=True), 1.0)
    counted = counted[:, None, :, None]
    queries = jnp.where(counted, queries.astype(jnp.float32), 0.0)
    mean = jnp.matmul(share[:, None, None], queries, precision="highest")[:, :, 0]
    if not use_covariance:
        return mean, None
    centred = jnp.where(counted, queries - mean[:, :, None], 0.0)
    scaled = jnp.swapaxes(centred * share[:, None, :, None], 2, 3)
    return mean, jnp.matmul(scaled, centred, precision="highest")


def mean_rotation(
    next_position: Int[Array, " B"], frequencies: Float[Array, " half"], horizon: int
) -> Float[Array, "B D D"]:
    """Mean of RoPE's rotation matrices (half-split layout) over the next `horizon` positions."""
    ahead = next_position[:, None] + jnp.arange(horizon, dtype=jnp.int32)[None]
    angles = ahead.astype(jnp.float32)[..., None] * frequencies[None, None]
    cos = jax.vmap(jnp.diag)(jnp.mean(jnp.cos(angles), axis=1))
    sin = jax.vmap(jnp.diag)(jnp.mean(jnp.sin(angles), axis=1))
    upper = jnp.concatenate([cos, -sin], axis=2)
    lower = jnp.concatenate([sin, cos], axis=2)
    return jnp.concatenate([upper, lower], axis=1)
