"""CriticalKV: a second look at any score, by the size of the projected value."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from kernels_pallas.removal_error.blockwise import by_slot_blocks, clean_values
from kernels_pallas.select import keep_mask
from kvjax.policies.base import Allocator, Params, Protection, Schedule, Scorer, StateField
from kvjax.policies.needed import needed
from kvjax.policies.observation import Observation, State
from kvjax.policies.registry import policy, register


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticalKV(Scorer):
    """Two stages over the scores s of `base`: the best half first, the rest by s ||W_O v||_1.

    Stage 1 takes the top floor(fraction x budget) entries of each head by s, the base method's
    protected entries counted first. Stage 2 ranks the others by (s + epsilon) ||W_O v_j||_1, the
    L1 norm averaged over the query group. Stage 1 is expressed in the score: these entries lie,
    in the order of s, above every stage 2 entry of their row and layer; under Ada or a global
    budget stage 1 acts as a floor per head.

    Paper: CriticalKV (arXiv 2502.03805). Defaults: fraction 0.5, epsilon 1e-4, SnapKV as base.
    """

    base: Scorer
    fraction: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"fraction={self.fraction}: allowed are fractions in [0, 1]")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.base.needs | {"output_projection"}

    @property
    def window(self) -> int:  # type: ignore[override]
        return self.base.window

    def protection(self) -> Protection:
        return self.base.protection()

    def allocator(self) -> Allocator:
        return self.base.allocator()

    def schedule(self) -> Schedule:
        return self.base.schedule()

    def for_model(self, num_heads: int, head_dim: int) -> CriticalKV:
        return dataclasses.replace(self, base=self.base.for_model(num_heads, head_dim))

    def slot_fields(self) -> dict[str, StateField]:
        return self.base.slot_fields()

    def layer_fields(self) -> dict[str, StateField]:
        return self.base.layer_fields()

    def update(self, observation: Observation, params: Params, state: State) -> State:
        return self.base.update(observation, params, state)

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        if observation.budget is None:
            raise ValueError("CriticalKV needs Observation.budget, the entries per head that stay")
        valid = observation.valid
        scores = jnp.where(valid, self.base.score(observation, params, state), 0.0)
        budget = jnp.broadcast_to(observation.budget[:, None], scores.shape[:2])
        rank = self.base.protection().rank(observation.positions, observation.next_position, budget)
        first_count = jnp.floor(self.fraction * budget.astype(jnp.float32)).astype(jnp.int32)
        first = keep_mask(scores, rank, valid, first_count)
        norms = projected_value_norms(
            observation.values, valid, needed(observation.output_projection, "output_projection")
        )
        second = jnp.where(valid, (scores + self.epsilon) * norms, 0.0)
        # Stage 1 keeps the order of s between `top` and twice `top`, above every stage 2 score.
        axes = (1, 2)
        top = jnp.max(jnp.where(first, -jnp.inf, second), axis=axes, keepdims=True, initial=0.0)
        top = jnp.where(top > 0, top * 1.0001, 1.0)
        low = jnp.min(jnp.where(first, scores, jnp.inf), axis=axes, keepdims=True)
        high = jnp.max(jnp.where(first, scores, -jnp.inf), axis=axes, keepdims=True)
        spread = jnp.where(high > low, high - low, 1.0)
        return jnp.where(first, top * (1.0 + (scores - low) / spread), second)


@register("criticalkv")
def criticalkv(base: str = "snapkv", fraction: float = 0.5, epsilon: float = 1e-4) -> Scorer:
    """CriticalKV over the named method: its best half first, the rest by s ||W_O v||_1.

    Stage 1 takes the top floor(fraction x budget) entries by the scores s of `base`; stage 2
    ranks the others by (s + epsilon) ||W_O v_j||_1 (mean over the query group).

    Paper: CriticalKV (arXiv 2502.03805). Defaults: SnapKV as base, fraction 0.5, epsilon 1e-4.
    Over Expected Attention, choose that method's use_vnorm=False.
    """
    scorer = policy(base).scorer
    if scorer is None:
        raise ValueError(f"base={base!r} keeps everything and has no scores to look at again")
    return CriticalKV(base=scorer, fraction=fraction, epsilon=epsilon)


def projected_value_norms(
    values: Float[Array, "B K S D"],
    valid: Bool[Array, "B K S"],
    output_projection: Float[Array, "H D E"],
) -> Float[Array, "B K S"]:
    """||v_j W_h||_1, mean over the heads h of the group; 0 in empty slots.

    The L1 norm has no small factor as the L2 norm has, so each block of slots really visits the
    E channels, one query head of each group at a time.
    """
    batch, kv_heads, slots = valid.shape
    heads, head_dim, model = output_projection.shape
    weights = output_projection.astype(jnp.float32)
    weights = weights.reshape(kv_heads, heads // kv_heads, head_dim, model)
    weights = jnp.moveaxis(weights, 1, 0)

    def part(start: Array, size: int) -> Array:
        block = clean_values(values, valid, start, size)

        def add(head: Array, total: Array) -> Array:
            projected = jnp.matmul(block, weights[head][None], precision="highest")
            return total + jnp.sum(jnp.abs(projected), axis=-1)

        return lax.fori_loop(0, weights.shape[0], add, jnp.zeros((*block.shape[:3],), jnp.float32))

    total = by_slot_blocks(part, slots, jnp.zeros((batch, kv_heads, slots), jnp.float32))
    return total / weights.shape[0]
