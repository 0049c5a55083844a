"""ReST-KV: entries are worth what the layer's output loses without them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.removal_error import removal_error, restkv_scores
from kernels_pallas.window_scores import window_attention, window_scores
from kvjax.policies.base import Granularity, Params, Protection, Scorer
from kvjax.policies.needed import needed
from kvjax.policies.observation import Observation, State
from kvjax.policies.pooling import pool
from kvjax.policies.reconstruction import output_factor, value_norms
from kvjax.policies.registry import register
from kvjax.policies.smoothing import (
    Rule,
    Temporal,
    attention_drift,
    drift_kernel,
    mean_places,
    query_weights,
    shifted_average,
    slot_order,
)
from kvjax.whole import check_whole

# Queries whose weights are in memory together, for the drift.
DRIFT_QUERIES = 8

# The window's queries, the keys, and the positions of both.
type Asked = tuple[
    Float[Array, "B H W D"], Float[Array, "B K S D"], Int[Array, "B W"], Int[Array, "B K S"]
]


@register("restkv")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReSTKV(Scorer):
    """Output reconstruction error of removing an entry, smoothed over queries and neighbours.

    Removing entry j from softmax weights A with output o changes the output by exactly
    A_j / (1 - A_j) (v_j - o). With a the average of A over the window's queries and over the n
    entries before the window, o = sum_(j<n) a_j v_j (not renormalised), and W_h the slice of W_O:

        s[j] = || sum_(h in group) a_h[j] / (1 - a_h[j]) (o_h - v_j) W_h ||_2

    and then the mean of s over a window of entries whose width and shift follow the drift of
    attention (`smoothing`). `params["output_factor"]`, from `output_factor`, saves factoring W_O.

    Paper: ReST-KV (arXiv 2605.08840), and CAOTE (arXiv 2504.14051) for the closed form.
    Defaults: window 32, alpha 0.3, tau 1, beta 2000, k_min 5 (the paper takes 21 for RULER and
    InfiniteBench), W_O on.

    Options:
      mode: "after" evaluates the score once on the smoothed weights, as the published numbers do;
        "before" is the paper's equation 7: the score of every query with its full output, window
        included, then the average of scores.
      granularity: "kv" is the exact joint change when the entry leaves the whole group; "query"
        scores and smooths each query head and reduces to the KV head by `reduction`.
      temporal, indicator, spatial: the paper's ablations. "attention" is a, "attention_value"
        is a ||v||_2; "avg" and "max" pool k_min entries with zeros beyond the ends.
      beta_fraction: beta as a fraction of the row's entries, in place of `beta`.

    Deviations: the released code lets every query head keep a set of its own; storage here is per
    KV head, so "query" is reduced. Drift is measured in places among the stored entries, which
    are positions as long as nothing has been evicted. It is per row (the release takes row 0's).
    With "kv" and tau != 1 the exponent applies to the norm divided by the group's summed odds.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"queries", "output_projection"})
    window: int = 32
    alpha: float = 0.3
    mode: Literal["after", "before"] = "after"
    granularity: Granularity = "kv"
    reduction: Literal["mean", "max"] = "mean"
    use_wo: bool = True
    tau: float = 1.0
    temporal: Temporal = "ema"
    indicator: Literal["reconstruction", "attention", "attention_value"] = "reconstruction"
    spatial: Literal["adaptive", "avg", "max", "none"] = "adaptive"
    beta: float = 2000.0
    beta_fraction: float | None = None
    k_min: int = 5
    rule: Rule = "clean"

    def __post_init__(self) -> None:
        allowed = {
            "mode": ("after", "before"),
            "granularity": ("kv", "query"),
            "reduction": ("mean", "max"),
            "temporal": ("ema", "mean", "last"),
            "indicator": ("reconstruction", "attention", "attention_value"),
            "spatial": ("adaptive", "avg", "max", "none"),
            "rule": ("clean", "released_code"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r}: allowed are {values}")
        check_whole("window", self.window, 1)
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha}: allowed are numbers in (0, 1]")
        if self.k_min < 1 or self.k_min % 2 == 0:
            raise ValueError(f"k_min={self.k_min}: allowed are odd integers >= 1")
        if not self.beta > 0:
            raise ValueError(f"beta={self.beta}: allowed are numbers > 0")
        if self.beta_fraction is not None and not 0 < self.beta_fraction <= 1:
            raise ValueError(f"beta_fraction={self.beta_fraction}: allowed are fractions in (0, 1]")

    def protection(self) -> Protection:
        return Protection(sinks=0, recent=self.window)

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        del state
        queries = needed(observation.queries, "queries")[:, :, -self.window :]
        query_positions = needed(observation.query_positions, "queries")
        asked = (
            queries,
            observation.keys,
            query_positions[:, -self.window :],
            observation.positions,
        )
        before_window = observation.next_position[:, None, None] - self.window
        entries = observation.valid & (observation.positions < before_window)
        scores = self._indicator(observation, params, asked)
        smooth = self._smoothed(observation, scores, asked, entries)
        if self.granularity == "query":
            batch, kv_heads, slots = entries.shape
            smooth = smooth.reshape(batch, kv_heads, -1, slots)
            reduce = jnp.max if self.reduction == "max" else jnp.mean
            smooth = reduce(smooth, axis=2)
        return smooth

    def _indicator(
        self, observation: Observation, params: Params, asked: Asked
    ) -> Float[Array, "B N S"]:
        """Unsmoothed scores; N is K or H. Outputs in mode "after" end before the window."""
        queries, keys, query_positions, positions = asked
        batch, heads, window, _ = queries.shape
        kv_heads, slots = positions.shape[1:]
        share = query_weights(query_positions, self.temporal, self.alpha)

        if self.indicator != "reconstruction":
            mean = window_scores(*asked, share, over_queries="sum", over_group=None)
            mean = mean.reshape(batch, kv_heads, -1, slots)
            if self.indicator == "attention_value":
                mean = mean * value_norms(observation.values, observation.valid)[:, :, None]
            joined = jnp.mean(mean, axis=2)
            return joined if self.granularity == "kv" else mean.reshape(batch, heads, slots)

        factor = params.get("output_factor") if isinstance(params, dict) else None
        if self.use_wo and factor is None:
            projection = needed(observation.output_projection, "output_projection")
            factor = output_factor(projection, kv_heads, self.granularity)
        if not self.use_wo:
            factor = None
        joint = self.granularity == "kv"

        if self.mode == "after":
            before_window = observation.next_position - self.window
            return restkv_scores(
                queries,
                keys,
                observation.values,
                query_positions,
                positions,
                share,
                before_window,
                factor,
                joint=joint,
                tau=self.tau,
            )

        all_of_them = jnp.full_like(observation.next_position, 2**30)

        def add(query: Array, total: Array) -> Array:
            own = lax.dynamic_index_in_dim(share, query, axis=1, keepdims=False)
            error = removal_error(
                window_attention(*_rows(asked, query, 1)).reshape(batch, kv_heads, -1, slots),
                observation.values,
                positions,
                all_of_them,
                factor,
                joint=joint,
                tau=self.tau,
            )
            return total + own[:, None, None] * error

        scored = kv_heads if joint else heads
        return lax.fori_loop(0, window, add, jnp.zeros((batch, scored, slots), jnp.float32))

    def _smoothed(
        self,
        observation: Observation,
        scores: Float[Array, "B N S"],
        asked: Asked,
        entries: Bool[Array, "B K S"],
    ) -> Float[Array, "B N S"]:
        """Smoothed scores of `entries`; the window's own stay as they are."""
        if self.spatial == "none":
            return scores
        group = scores.shape[1] // entries.shape[1]
        entries = jnp.repeat(entries, group, axis=1)
        if self.spatial == "adaptive":
            smooth = self._adaptive(observation, scores, asked, entries, group)
        else:
            smooth = pool(jnp.where(entries, scores, 0.0), self.k_min, self.spatial)
        return jnp.where(entries, smooth, scores)

    def _adaptive(
        self,
        observation: Observation,
        scores: Float[Array, "B N S"],
        asked: Asked,
        entries: Bool[Array, "B N S"],
        group: int,
    ) -> Float[Array, "B N S"]:
        if observation.budget is None:
            raise ValueError(
                "ReST-KV's adaptive smoothing needs Observation.budget, the entries per head that "
                "stay; give it, or choose spatial='avg', 'max' or 'none'"
            )
        slots = scores.shape[-1]
        if self.beta_fraction is None:
            steps = math.floor((slots - 1) / self.beta)  # |drift| is below the number of slots
            beta = jnp.full(scores.shape[:2], self.beta, jnp.float32)
        else:
            steps = math.floor(1 / self.beta_fraction)
            count = jnp.sum(observation.valid, axis=-1, dtype=jnp.int32)
            count = jnp.repeat(count, group, axis=1).astype(jnp.float32)
            beta = jnp.maximum(self.beta_fraction * count, jnp.float32(1e-6))
        if steps == 0 and self.rule == "clean":
            width = jnp.full(scores.shape[:2], self.k_min, jnp.int32)
            return shifted_average(scores, entries, width, jnp.zeros_like(width), self.k_min // 2)
        order, count = slot_order(observation.valid), observation.budget - self.window
        places = _by_queries(
            lambda rows: mean_places(window_attention(*rows), order, count), asked, DRIFT_QUERIES
        )
        drift = attention_drift(places, asked[2])
        drift = jnp.mean(drift.reshape(*scores.shape[:2], -1), axis=-1)
        width, shift = drift_kernel(drift, beta, self.k_min, self.rule)
        reach = max(self.k_min // 2, steps) + steps + (self.rule == "released_code")
        return shifted_average(scores, entries, width, shift, reach)


def _rows(asked: Asked, first: Array, count: int) -> tuple[Array, Array, Array, Array]:
    """`asked` with `count` of its queries."""
    queries, keys, query_positions, positions = asked
    queries = lax.dynamic_slice_in_dim(queries, first, count, axis=2)
    query_positions = lax.dynamic_slice_in_dim(query_positions, first, count, axis=1)
    return queries, keys, query_positions, positions


def _by_queries(
    function: Callable[[tuple[Array, Array, Array, Array]], Array], asked: Asked, block: int
) -> Float[Array, "B H W"]:
    """`function` of a block of queries at a time, so that it never holds all their weights."""
    batch, heads, window, _ = asked[0].shape
    block = min(block, window)

    def visit(step: Array, found: Array) -> Array:
        first = jnp.minimum(step * block, window - block)  # the last block may repeat some
        return lax.dynamic_update_slice_in_dim(
            found, function(_rows(asked, first, block)), first, axis=2
        )

    found = jnp.zeros((batch, heads, window), jnp.float32)
    return lax.fori_loop(0, -(-window // block), visit, found)
