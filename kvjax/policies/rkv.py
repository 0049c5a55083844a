"""R-KV: important and not redundant, for long chains of thought."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.policies.base import Params, Protection, Schedule, Scorer
from kvjax.policies.needed import needed
from kvjax.policies.observation import Observation, State
from kvjax.policies.pooling import check_pooling, pool
from kvjax.policies.registry import register

_ROWS = 128  # rows of the cosine matrix that exist at a time


@register("rkv")
@dataclasses.dataclass(frozen=True, kw_only=True)
class RKV(Scorer):
    """Attention of the last queries, traded against similarity to other keys.

    s[j] = lam * I[j] - (1 - lam) * R[j]
    I = maxpool(mean over window of softmax over older keys of max over group of q K^T / sqrt(D))
    R = softmax over keys of column means of the keys' cosine matrix, where the diagonal and, in
    each row, the newest entry above `threshold` are set to 0: the newest of near-duplicates
    is not counted as redundant.

    Paper: R-KV (arXiv 2505.24133). Defaults: lam 0.1, window 8 (protected), max pooling of width
    7, threshold 0.5, eviction every 128 decoded tokens.
    Deviations: a row without an entry above the threshold zeroes nothing (the released code
    then zeroes its first column); a prompt over the budget is cut by the same rule.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"queries"})
    window: int = 8
    lam: float = 0.1
    kernel: int = 7
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if self.window < 1 or not 0 <= self.lam <= 1:
            raise ValueError(
                f"window={self.window}, lam={self.lam}: allowed are window >= 1 and lam in [0, 1]"
            )
        check_pooling(self.kernel)

    def protection(self) -> Protection:
        return Protection(sinks=0, recent=self.window)

    def schedule(self) -> Schedule:
        return Schedule(decode_interval=128)

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        del params, state
        redundancy = _redundancy(observation.keys, observation.valid, self.threshold)
        return self.lam * self._importance(observation) - (1.0 - self.lam) * redundancy

    def _importance(self, observation: Observation) -> Float[Array, "B K S"]:
        queries = needed(observation.queries, "queries")
        batch, _, window, head_dim = queries.shape
        kv_heads = observation.keys.shape[1]
        queries = queries.reshape(batch, kv_heads, -1, window, head_dim)
        logits = jnp.einsum(
            "bkgqd,bksd->bkgqs",
            queries,
            observation.keys,
            precision="highest",
            preferred_element_type=jnp.float32,
        )
        logits = jnp.max(logits, axis=2) * (head_dim**-0.5)
        start = observation.next_position - self.window
        older = observation.valid & (observation.positions < start[:, None, None])
        asked = needed(observation.query_positions, "queries") >= 0
        weights = _softmax(logits, older[:, :, None] & asked[:, None, :, None])
        count = jnp.maximum(jnp.sum(asked, axis=-1).astype(jnp.float32), 1.0)
        return pool(jnp.sum(weights, axis=2) / count[:, None, None], self.kernel, "max")


def _softmax(logits: Float[Array, "*n S"], where: Bool[Array, "*n S"]) -> Float[Array, "*n S"]:
    """Softmax over the given entries, 0 elsewhere, also where there is none."""
    logits = jnp.where(where, logits, -jnp.inf)
    highest = jnp.max(logits, axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min)
    mass = jnp.exp(logits - highest)
    total = jnp.sum(mass, axis=-1, keepdims=True)
    return mass / jnp.where(total > 0, total, 1.0)


def _redundancy(
    keys: Float[Array, "B K S D"], valid: Bool[Array, "B K S"], threshold: float
) -> Float[Array, "B K S"]:
    keys = jnp.where(valid[..., None], keys, 0).astype(jnp.float32)
    norms = jnp.sqrt(jnp.sum(keys * keys, axis=-1, keepdims=True))
    unit = keys / jnp.where(norms > 0, norms, 1.0)
    batch, kv_heads, slots, head_dim = unit.shape
    blocks = -(-slots // _ROWS)
    rows = jnp.pad(unit, ((0, 0), (0, 0), (0, blocks * _ROWS - slots), (0, 0)))
    rows = jnp.moveaxis(rows.reshape(batch, kv_heads, blocks, _ROWS, head_dim), 2, 0)
    column = jnp.arange(slots)

    # The whole cosine matrix would be quadratic in memory.
    def add(total: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
        unit_rows, first = block
        cosine = jnp.einsum("bkrd,bksd->bkrs", unit_rows, unit, precision="highest")
        row = first + jnp.arange(_ROWS)[:, None]
        cosine = jnp.where((column[None, :] == row)[None, None], 0.0, cosine)
        near = jnp.where(cosine > threshold, column[None, None, None, :], -1)
        newest = jnp.max(near, axis=-1, keepdims=True)
        cosine = jnp.where(column[None, None, None, :] == newest, 0.0, cosine)
        return total + jnp.sum(cosine, axis=2), None

    total, _ = jax.lax.scan(
        add, jnp.zeros((batch, kv_heads, slots), jnp.float32), (rows, jnp.arange(blocks) * _ROWS)
    )
    count = jnp.maximum(jnp.sum(valid, axis=-1, keepdims=True).astype(jnp.float32), 1.0)
    return _softmax(total / count, valid)
