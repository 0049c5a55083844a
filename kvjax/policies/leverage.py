"""Leverage scores: the keys that the other keys cannot explain, without any query."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.policies.base import Params, Scorer
from kvjax.policies.observation import Observation, State
from kvjax.policies.registry import register
from kvjax.policies.rope import rotate
from kvjax.whole import check_whole


@register("leverage")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LeverageScore(Scorer):
    """Ridge leverage of each key among the keys of its head.

    s[j] = k_j^T (K^T K + lambda I)^-1 k_j,  lambda = ridge * trace(K^T K) / D

    Paper: Compactor (arXiv 2507.08143), its geometric half. Defaults: keys before RoPE, exact
    (`sketch=None`), ridge 1e-3, 4 sinks.
    Deviations: exact instead of a Gaussian sketch of the channels (`sketch=48` gives one, with a
    fixed seed); the ridge is relative, so that the score does not depend on the scale of the keys.
    """

    sketch: int | None = None
    ridge: float = 1e-3
    pre_rope: bool = True

    def __post_init__(self) -> None:
        if self.sketch is not None:
            check_whole("sketch", self.sketch, 1)
        if self.ridge <= 0:
            raise ValueError(f"ridge={self.ridge}: allowed are numbers > 0")

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        del params, state
        keys = jnp.where(observation.valid[..., None], observation.keys, 0).astype(jnp.float32)
        if self.pre_rope:
            keys = rotate(keys, observation.positions, observation.rope_frequencies, inverse=True)
        if self.sketch is not None:
            shape = (keys.shape[-1], self.sketch)
            projection = jax.random.normal(jax.random.key(0), shape) * (self.sketch**-0.5)
            keys = jnp.einsum("bksd,de->bkse", keys, projection, precision="highest")
        return leverage(keys, observation.valid, self.ridge)


def leverage(
    keys: Float[Array, "B K S D"], valid: Bool[Array, "B K S"], ridge: float
) -> Float[Array, "B K S"]:
    """Ridge leverage scores in [0, 1]; invalid entries have 0 and no influence."""
    keys = jnp.where(valid[..., None], keys, 0.0)
    # Leverage ignores scale; unit scale keeps float32 clear of overflow and of a zero ridge.
    largest = jnp.max(jnp.abs(keys), axis=(2, 3), keepdims=True)
    keys = keys / jnp.where(largest > 0, largest, 1.0)
    gram = jnp.einsum("bksd,bkse->bkde", keys, keys, precision="highest")
    width = keys.shape[-1]
    strength = jnp.maximum(ridge * jnp.trace(gram, axis1=-2, axis2=-1) / width, 1e-6)
    eye = jnp.eye(width, dtype=jnp.float32)[None, None]
    factor = jnp.linalg.cholesky(gram + strength[..., None, None] * eye)
    inverse = jax.scipy.linalg.solve_triangular(
        factor, jnp.broadcast_to(eye, factor.shape), lower=True
    )
    whitened = jnp.einsum("bksd,bked->bkse", keys, inverse, precision="highest")
    return jnp.sum(whitened * whitened, axis=-1)
