"""CAOTE: the exact change of an attention output when one entry is removed."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.removal_error import removal_error
from kernels_pallas.removal_error.blockwise import attention_output, error_of, odds
from kvjax.policies.base import Params, Protection, Scorer
from kvjax.policies.observation import Observation, State
from kvjax.policies.pooling import check_pooling
from kvjax.policies.registry import register
from kvjax.policies.snapkv import SnapKV
from kvjax.whole import check_whole


@register("caote")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CAOTE(Scorer):
    """Attention odds times the distance of a value from the output it is part of.

    s[j] = a_j / (1 - a_j) ||o - v_j||_2, o = sum_j a_j v_j, with a = SnapKV's scores normalised
    to sum 1 over the valid entries. `fast` (FastCAOTE) takes the mean of the values for o.

    Paper: CAOTE (arXiv 2504.14051). Defaults: SnapKV's window 32 and average pooling of width 5;
    the window is protected. Deviation: one weight per KV head, the mean of its query group.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"queries"})
    window: int = 32
    kernel: int = 5
    pooling: Literal["avg", "max"] = "avg"
    fast: bool = False

    def __post_init__(self) -> None:
        check_whole("window", self.window, 1)
        check_pooling(self.kernel, self.pooling)

    def protection(self) -> Protection:
        return Protection(sinks=0, recent=self.window)

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        base = SnapKV(window=self.window, kernel=self.kernel, pooling=self.pooling)
        valid, values = observation.valid, observation.values
        weights = jnp.where(valid, base.score(observation, params, state), 0.0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = (weights / jnp.where(total > 0, total, 1.0))[:, :, None]
        if not self.fast:
            everything = jnp.full(values.shape[0], jnp.iinfo(jnp.int32).max, jnp.int32)
            positions = observation.positions
            return removal_error(weights, values, positions, everything, None, joint=True)
        count = jnp.sum(valid, axis=-1, keepdims=True).astype(jnp.float32)
        even = valid.astype(jnp.float32) / jnp.maximum(count, 1.0)
        output = attention_output(even[:, :, None], values, valid)
        return error_of(odds(weights), output, values, valid, None, joint=True)
