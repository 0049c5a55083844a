"""KeyDiff: keep the keys that point away from the average key."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.base import Params, Protection, Schedule, Scorer
from kvjax.policies.observation import Observation, State
from kvjax.policies.registry import register


@register("keydiff")
@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyDiff(Scorer):
    """Negative cosine between each key and the mean direction of the head's keys.

    s[j] = -cos(k_j, a),  a = mean_j k_j / ||k_j||

    Paper: KeyDiff (arXiv 2504.15364). Defaults: no sinks, no recent window; one shot after
    prefill (`keydiff-block` is the paper's block-wise schedule).
    Deviation: a zero key has cosine 0 with everything.
    """

    def protection(self) -> Protection:
        return Protection(sinks=0)

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        del params, state
        # Masked before the sum, not by a zero weight: 0 * inf of an empty slot would be NaN.
        keys = jnp.where(observation.valid[..., None], observation.keys, 0).astype(jnp.float32)
        norms = jnp.sqrt(jnp.sum(keys * keys, axis=-1))
        inverse = jnp.where(norms > 0, 1.0 / jnp.where(norms > 0, norms, 1.0), 0.0)
        # The cosine does not depend on the anchor's length, so the sum serves for the mean.
        anchor = jnp.einsum("bks,bksd->bkd", inverse, keys, precision="highest")
        length = jnp.sqrt(jnp.sum(anchor * anchor, axis=-1, keepdims=True))
        anchor = anchor / jnp.where(length > 0, length, 1.0)
        return -inverse * jnp.einsum("bksd,bkd->bks", keys, anchor, precision="highest")


@register("keydiff-block")
@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyDiffBlock(KeyDiff):
    """KeyDiff applied block by block while the prompt is read, and while text is generated.

    s[j] = -cos(k_j, a) over the entries kept so far and the block of new tokens

    Paper: KeyDiff (arXiv 2504.15364). Defaults: blocks of 128 tokens in prefill and in decode.
    Deviation: decoding evicts every 128 tokens instead of at each one.
    """

    def schedule(self) -> Schedule:
        return Schedule(prefill="chunked", chunk=128, decode_interval=128)
