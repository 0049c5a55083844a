"""Evicted entries that live on in their kept neighbours."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.policies.base import Policy, Remainder
from kvjax.policies.registry import register
from kvjax.policies.snapkv import SnapKV
from kvjax.whole import check_whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheMerging(Remainder):
    """Adds the value of an evicted entry, in equal parts, to the next kept entries.

    For the m = `neighbours` kept entries that follow i (fewer near the end):

        v_j <- v_j + p_i v_i / m,  p_i = min(1, s_i / mean of s over the head's kept entries)

    Keys stay as they are. Evicted entries behind the last kept one are lost.

    Paper: CaM (Zhang et al., ICML 2024), where p_i is the probability of a random draw.
    Defaults: 32 neighbours. Deviations: the expectation replaces the draw, so that results do not
    depend on a key; s is the policy's score, which should be an attention weight or grow with it
    (p_i is 0 where s_i or the mean is not positive).
    """

    neighbours: int = 32

    def __post_init__(self) -> None:
        check_whole("neighbours", self.neighbours, 1)

    def apply(
        self,
        keys: Float[Array, "B K S D"],
        values: Float[Array, "B K S D"],
        positions: Int[Array, "B K S"],
        keep: Bool[Array, "B K S"],
        scores: Float[Array, "B K S"],
    ) -> tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]]:
        valid = positions >= 0
        keep = keep & valid
        evicted = valid & ~keep
        scores = jnp.where(valid & jnp.isfinite(scores), scores.astype(jnp.float32), 0.0)
        kept_before = jnp.cumsum(keep, axis=-1, dtype=jnp.int32) - keep.astype(jnp.int32)
        kept = jnp.sum(keep, axis=-1, keepdims=True, dtype=jnp.int32)
        mean = jnp.sum(jnp.where(keep, scores, 0.0), axis=-1, keepdims=True)
        mean = mean / jnp.maximum(kept, 1).astype(jnp.float32)
        ratio = jnp.where(mean > 0, scores / jnp.where(mean > 0, mean, 1.0), 0.0)
        receivers = jnp.minimum(self.neighbours, kept - kept_before)
        part = jnp.clip(ratio, 0.0, 1.0) / jnp.maximum(receivers, 1).astype(jnp.float32)
        part = jnp.where(evicted & (receivers > 0), part, 0.0)[..., None]
        clean = jnp.where(valid[..., None], values.astype(jnp.float32), 0.0)
        # Sums of the gaps between kept entries, then of the gaps each kept entry looks back on.
        gaps = jnp.zeros(values.shape, jnp.float32).at[_rows(kept_before)].add(part * clean)
        received = _trailing_sum(gaps, self.neighbours)
        received = jnp.take_along_axis(received, kept_before[..., None], axis=2)
        merged = jnp.where(keep[..., None], clean + received, clean)
        return keys, merged.astype(values.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PivotMerging(Remainder):
    """Averages each evicted entry into the kept entry with the most similar key.

    With c(i) = argmax over kept j of cos(k_i, k_j), and n_j entries assigned to j:

        k_j <- (k_j + sum over i assigned of (k_i + k_j) / 2) / (1 + n_j),  v_j likewise

    Paper: LOOK-M (arXiv 2406.18139), its pivotal merging, also an option of ReST-KV's release.
    Keys are compared and averaged after RoPE, as there. Costs S x kept x D per head.
    """

    block: int = 256  # entries compared at a time; memory is B K block^2 floats

    def __post_init__(self) -> None:
        check_whole("block", self.block, 1)

    def apply(
        self,
        keys: Float[Array, "B K S D"],
        values: Float[Array, "B K S D"],
        positions: Int[Array, "B K S"],
        keep: Bool[Array, "B K S"],
        scores: Float[Array, "B K S"],
    ) -> tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]]:
        del scores
        valid = positions >= 0
        keep = keep & valid
        clean_keys = jnp.where(valid[..., None], keys.astype(jnp.float32), 0.0)
        clean_values = jnp.where(valid[..., None], values.astype(jnp.float32), 0.0)
        pivots = self._most_similar(clean_keys, keep)
        merged = (valid & ~keep).astype(jnp.float32)[..., None]
        index = _rows(pivots)
        count = jnp.zeros((*positions.shape, 1), jnp.float32).at[index].add(merged)

        def average(own: Float[Array, "B K S D"]) -> Float[Array, "B K S D"]:
            total = jnp.zeros_like(own).at[index].add(merged * own)
            result = (own * (1.0 + 0.5 * count) + 0.5 * total) / (1.0 + count)
            return jnp.where(keep[..., None], result, own)

        return average(clean_keys).astype(keys.dtype), average(clean_values).astype(values.dtype)

    def _most_similar(
        self, keys: Float[Array, "B K S D"], keep: Bool[Array, "B K S"]
    ) -> Int[Array, "B K S"]:
        """For each entry the kept slot whose key has the largest cosine, the first of equals."""
        slots = keep.shape[-1]
        size = min(self.block, slots)
        norms = jnp.sqrt(jnp.sum(jnp.square(keys), axis=-1, keepdims=True))
        unit = keys / jnp.maximum(norms, 1e-20)
        # Kept entries in front: blocks beyond the longest head are never compared.
        order = jnp.argsort(~keep, axis=-1, stable=True).astype(jnp.int32)
        front = jnp.take_along_axis(unit, order[..., None], axis=2)
        kept = jnp.sum(keep, axis=-1, keepdims=True, dtype=jnp.int32)
        blocks = -(-jnp.max(kept) // size)

        def block_start(step: Array) -> Array:
            return jnp.minimum(step * size, slots - size)

        def rows_of(step: Array, places: Array) -> Array:
            rows = lax.dynamic_slice_in_dim(unit, block_start(step), size, axis=2)

            def compare(other: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
                start = block_start(other)
                near = lax.dynamic_slice_in_dim(front, start, size, axis=2)
                cosine = jnp.einsum("bkqd,bksd->bkqs", rows, near, precision="highest")
                place = start + jnp.arange(size, dtype=jnp.int32)
                present = (place[None, None] < kept)[:, :, None]
                cosine = jnp.where(present, cosine, -jnp.inf)
                # Two plain reductions: an argmax does not vectorise on the CPU.
                best = jnp.max(cosine, axis=-1)
                is_best = cosine == best[..., None]
                first = jnp.min(jnp.where(is_best, place[None, None, None], slots), axis=-1)
                better = best > found[0]
                return jnp.where(better, best, found[0]), jnp.where(better, first, found[1])

            empty = (jnp.full(rows.shape[:3], -jnp.inf), jnp.zeros(rows.shape[:3], jnp.int32))
            place = lax.fori_loop(0, blocks, compare, empty)[1]
            return lax.dynamic_update_slice_in_dim(places, place, block_start(step), axis=2)

        places = jnp.zeros(keep.shape, jnp.int32)
        places = lax.fori_loop(0, -(-slots // size), rows_of, places)
        return jnp.take_along_axis(order, places, axis=2)


def _rows(index: Int[Array, "B K S"]) -> tuple[Array, Array, Array]:
    """Index arrays that address slot `index` of each row and head."""
    batch, heads, _ = index.shape
    return jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None], index


def _trailing_sum(array: Float[Array, "B K S D"], width: int) -> Float[Array, "B K S D"]:
    """out[i] = sum of array[i - width + 1 .. i], by doubling."""

    def delayed(x: Array, steps: int) -> Array:
        steps = min(steps, x.shape[2])
        return jnp.pad(x, ((0, 0), (0, 0), (steps, 0), (0, 0)))[:, :, : x.shape[2]]

    total, span, covered = jnp.zeros_like(array), array, 0
    length = 1
    while width:
        if width & 1:
            total = total + delayed(span, covered)
            covered += length
        width >>= 1
        if width:
            span = span + delayed(span, length)
            length *= 2
    return total


@register("value-merging")
def value_merging(window: int = 32, neighbours: int = 32) -> Policy:
    """SnapKV whose evicted values are merged into the kept entries that follow (`CacheMerging`).

    Paper: CaM (Zhang et al., ICML 2024) over SnapKV's scores. Defaults: window 32, 32 neighbours.
    """
    scorer = SnapKV(window=window)
    return Policy(
        name="value-merging",
        scorer=scorer,
        protection=scorer.protection(),
        remainder=CacheMerging(neighbours=neighbours),
    )
