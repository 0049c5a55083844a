"""How a budget is split over layers and heads. Each works with every scorer."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.select import keep_mask, order_key
from kvjax.policies.base import Allocator, Uniform
from kvjax.policies.cake import Cake
from kvjax.policies.competition import (
    apportion,
    ceiling_entries,
    check_ceiling,
    competing_budgets,
    largest_under,
)
from kvjax.whole import check_whole

__all__ = ["Ada", "Cake", "Global", "Pyramid", "Uniform", "global_budgets"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pyramid(Allocator):
    """Layer budgets that fall linearly with depth; heads of a layer alike.

    With base = budget - recent: the last layer keeps base // beta and the first as much above
    base as the last lies below; both move together where the first would exceed the row's
    T - recent entries. Every layer keeps `recent` more. Rows with T < 2 base, and models of one
    layer, are uniform.

    Paper: PyramidKV (arXiv 2406.02069). Defaults: beta 20, recent 32 (SnapKV's window).
    Deviation: layers in between are rounded so that the mean is exactly the budget; the release
    rounds the step down, which exceeds it.
    """

    beta: int = 20
    recent: int = 32

    def __post_init__(self) -> None:
        check_whole("beta", self.beta, 1)
        check_whole("recent", self.recent, 0)

    def layer_budgets(
        self, budget: Int[Array, " B"], lengths: Int[Array, " B"], num_layers: int
    ) -> Int[Array, "L B"]:
        if num_layers == 1:
            return budget[None]
        recent = jnp.minimum(self.recent, budget)
        base = budget - recent
        room = lengths - recent
        highest = 2 * base - base // self.beta
        highest = jnp.where(highest >= room, room, highest)
        lowest = 2 * base - highest
        depth = jnp.arange(num_layers, dtype=jnp.float32)[None] / (num_layers - 1)
        fall = (highest - lowest).astype(jnp.float32)[:, None]
        shares = (highest + recent).astype(jnp.float32)[:, None] - fall * depth
        ones = jnp.ones(shares.shape, jnp.int32)
        budgets = apportion(shares, num_layers * budget, ones, ones * lengths[:, None])
        uniform = (lengths < 2 * base)[:, None] | (budget >= lengths)[:, None]
        return jnp.where(uniform, budget[:, None], budgets).T

    def largest(self, budget: int, length: int, num_layers: int, num_kv_heads: int) -> int:
        del num_kv_heads
        if num_layers == 1 or budget >= length:
            return budget
        return min(length, 2 * budget)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ada(Allocator):
    """The heads of a layer compete for its entries, above a floor.

    With p_h protected entries, base_h = budget - p_h, and f_h the number of head h's entries
    among the layer's best sum_h base_h unprotected ones:

        budget_h = p_h + (1 - floor) f_h + floor base_h

    `normalize` multiplies a head's scores by the share of its mass that its best base_h hold.

    Paper: Ada-KV (arXiv 2407.11550). Defaults: floor 0.2, no normalisation. Deviation: rounded
    by largest remainder, so that the layer's total is exact; the release rounds each head alone.
    """

    floor: float = 0.2
    normalize: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor={self.floor}: allowed are fractions in [0, 1]")

    def head_budgets(
        self,
        scores: Float[Array, "B K S"],
        valid: Bool[Array, "B K S"],
        rank: Int[Array, "B K S"],
        budget: Int[Array, " B"],
    ) -> Int[Array, "B K"]:
        lengths = jnp.sum(valid, axis=-1, dtype=jnp.int32)
        protected = jnp.sum(valid & (rank > 0), axis=-1, dtype=jnp.int32)
        protected = jnp.minimum(protected, budget[:, None])
        base = budget[:, None] - protected
        total = budget * scores.shape[1]
        if self.normalize:
            scores = scores * self._concentration(scores, valid & (rank <= 0), base)
        keys = order_key(scores, rank, valid)
        won = competing_budgets(keys, total, jnp.minimum(protected, lengths), lengths)
        contested = (won - protected).astype(jnp.float32)
        shares = (1 - self.floor) * contested + self.floor * base.astype(jnp.float32)
        shares = shares + protected.astype(jnp.float32)
        return apportion(shares, total, jnp.minimum(lengths, 1), lengths)

    def _concentration(
        self, scores: Float[Array, "B K S"], open_slots: Bool[Array, "B K S"], base: Array
    ) -> Float[Array, "B K 1"]:
        best = keep_mask(scores, jnp.zeros(scores.shape, jnp.int32), open_slots, base)
        held = jnp.sum(jnp.where(best, scores, 0.0), axis=-1, keepdims=True)
        mass = jnp.sum(jnp.where(open_slots, scores, 0.0), axis=-1, keepdims=True)
        return held / jnp.where(mass == 0, 1.0, mass)

    def largest(self, budget: int, length: int, num_layers: int, num_kv_heads: int) -> int:
        del num_layers
        return min(length, num_kv_heads * (budget - 1) + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Global(Allocator):
    """All heads of all layers compete: the best entries of the whole model stay.

    `floor` entries of every head are safe (an integer, or a fraction of the budget), at least
    one. The total is exactly layers x heads x budget, or all there is. Ties go to the first
    layers, then heads, then positions. Scores must be comparable across layers.

    As in KVzip (arXiv 2505.23416) and global retention. No head gets more than `ceiling` times
    the budget: that many candidates per head have to be kept until the last layer is known, and
    they bound the peak at ceiling x budget entries per head (None: all entries are candidates).
    """

    crosses_layers: ClassVar[bool] = True
    floor: int | float = 0
    ceiling: float | None = 4.0

    def __post_init__(self) -> None:
        if self.floor < 0 or (isinstance(self.floor, float) and self.floor > 1):
            raise ValueError(
                f"floor={self.floor}: allowed are integers >= 0 or a fraction of the budget in "
                "[0, 1]"
            )
        check_ceiling(self.ceiling)

    def allocate(
        self,
        scores: Float[Array, "L B K S"],
        valid: Bool[Array, "L B K S"],
        rank: Int[Array, "L B K S"],
        budget: Int[Array, " B"],
        lengths: Int[Array, " B"],
        preference: Float[Array, "L B"] | None = None,
    ) -> Int[Array, "L B K"]:
        del lengths, preference
        if isinstance(self.floor, float):
            floor = jnp.floor(self.floor * budget.astype(jnp.float32)).astype(jnp.int32)
        else:
            floor = jnp.minimum(self.floor, budget)
        total = budget * (scores.shape[0] * scores.shape[2])
        return global_budgets(
            scores, valid, rank, total, floor=floor, ceiling=ceiling_entries(self.ceiling, budget)
        )

    def largest(self, budget: int, length: int, num_layers: int, num_kv_heads: int) -> int:
        others = num_layers * num_kv_heads - 1
        safe = math.floor(self.floor * budget) if isinstance(self.floor, float) else self.floor
        safe = max(1, min(safe, budget, length))
        most = (others + 1) * budget - others * safe
        return min(length, largest_under(self.ceiling, budget, most))


def global_budgets(
    scores: Float[Array, "L B K S"],
    valid: Bool[Array, "L B K S"],
    rank: Int[Array, "L B K S"],
    total: Int[Array, " B"],
    *,
    floor: Int[Array, " B"] | None = None,
    ceiling: Int[Array, " B"] | None = None,
) -> Int[Array, "L B K"]:
    """Entries of each head among the `total` best of the row, by (protected, score, order).

    Every head that holds anything keeps at least one entry, and `floor` of them where given.
    """
    keys = jnp.moveaxis(order_key(scores, rank, valid), 1, 0)  # [B, L, K, S]
    high = jnp.moveaxis(jnp.sum(valid, axis=-1, dtype=jnp.int32), 1, 0)
    if ceiling is not None:
        high = jnp.minimum(high, ceiling[:, None, None])
    safe = jnp.ones_like(high) if floor is None else jnp.maximum(floor, 1)[:, None, None]
    budgets = competing_budgets(keys, total, jnp.minimum(safe, high), high)
    return jnp.moveaxis(budgets, 1, 0)
