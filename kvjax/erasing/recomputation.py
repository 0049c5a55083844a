"""Delete and shift, then compute suffix tokens again: all, the first ones, or chosen ones."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.cache import Cache, edits
from kvjax.erasing.deletion import delete_and_shift
from kvjax.erasing.method import Edit, Method, refuse_layer
from kvjax.erasing.ranking import deviation
from kvjax.erasing.reencoding import reencode
from kvjax.erasing.spans import (
    first_start,
    largest,
    listed,
    removed_before,
    run,
    tokens_at,
    without,
)
from kvjax.models.decoder import Decoder


def recompute(
    model: Decoder,
    cache: Cache,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B M"],
    reads: int | None = None,
) -> Cache:
    """The cache with the tokens at `positions` encoded anew over everything else in it."""
    if positions.shape[1] == 0:
        return cache
    fresh = reencode(model, cache, tokens_at(tokens, positions), positions, reads=reads)
    return edits.overwrite(cache, *fresh, positions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recompute(Method):
    """Full recomputation: the prefix is reused and the whole suffix is prefilled after it.

    On a full cache this is the exact answer, as though the spans had never been there. On an
    evicted one it is that over the prefix entries that each head still has, and only suffix
    entries that are still there are replaced.
    """

    name: ClassVar[str] = "recompute"
    moves: ClassVar[bool] = True

    def apply(self, edit: Edit) -> Cache:
        model, spans, extent = edit.model, edit.spans, edit.extent
        start = first_start(spans, edit.cache.next_position)
        moved = delete_and_shift(model, edit.cache, spans)
        suffix = run(start, moved.next_position, extent.suffix)
        tokens = without(edit.tokens, spans)
        return recompute(model, moved, tokens, suffix, reads=extent.prefix)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalRepair(Method):
    """Local suffix repair: delete and shift, then prefill the first R suffix tokens anew.

    They attend to the prefix and to each other. With several spans, the R tokens behind each.
    `tokens` up to 32 is what LegoLink (arXiv 2410.15332) does at the start of a chunk.
    """

    name: ClassVar[str] = "local-repair"
    moves: ClassVar[bool] = True

    tokens: int = 32

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"method {self.name!r}, tokens={self.tokens}: allowed are >= 0")

    def apply(self, edit: Edit) -> Cache:
        model, spans, extent = edit.model, edit.spans, edit.extent
        moved, tokens = delete_and_shift(model, edit.cache, spans), without(edit.tokens, spans)
        width = min(self.tokens * spans.shape[1], extent.suffix)
        starts = spans[:, :, 0] - removed_before(spans, spans[:, :, 0])
        place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, None]
        near = (place >= starts[:, :, None]) & (place < starts[:, :, None] + self.tokens)
        near &= (spans[:, :, 1] > spans[:, :, 0])[:, :, None]
        here = jnp.any(near, axis=1) & (place[0] < moved.next_position[:, None])
        reads = extent.prefix if spans.shape[1] == 1 else None
        chosen = listed(here, width)
        return recompute(model, moved, tokens, chosen, reads=reads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheBlend(Method):
    """Delete and shift, then recompute the share of suffix tokens whose K and V deviate most.

    After CacheBlend (arXiv 2405.16444): the layers up to `check_layer` are computed for the whole
    suffix and kept; the tokens whose K and V in that layer differ most from the cached ones are
    computed through all layers over the spliced cache. Simpler than there: one check layer, and no
    candidates that shrink from layer to layer.
    """

    name: ClassVar[str] = "cacheblend"
    moves: ClassVar[bool] = True

    fraction: float = 0.15
    check_layer: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"method {self.name!r}, fraction={self.fraction}: allowed are (0, 1]")

    def check(self, model: Decoder) -> None:
        refuse_layer(self.name, self.check_layer, model)

    def apply(self, edit: Edit) -> Cache:
        model, spans, extent = edit.model, edit.spans, edit.extent
        start = first_start(spans, edit.cache.next_position)
        moved, tokens = delete_and_shift(model, edit.cache, spans), without(edit.tokens, spans)
        if extent.suffix == 0:
            return moved
        suffix = run(start, moved.next_position, extent.suffix)
        keys, values = reencode(
            model, moved, tokens_at(tokens, suffix), suffix,
            reads=extent.prefix, layers=self.check_layer + 1,
        )  # fmt: skip
        differs = deviation(moved, self.check_layer, keys[-1], values[-1], suffix)
        suffix_length = (moved.next_position - start).astype(jnp.float32)
        count = jnp.round(self.fraction * suffix_length).astype(jnp.int32)
        chosen = largest(differs, suffix, count, math.ceil(self.fraction * extent.suffix))
        spliced = edits.overwrite(moved, keys, values, suffix)
        return recompute(model, spliced, tokens, chosen)
