"""Steering states, and the suffix tokens that took most from the span recomputed over them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp

from kvjax.cache import Cache
from kvjax.erasing.method import Edit, Method, refuse_layer
from kvjax.erasing.ranking import attention_to, deviation
from kvjax.erasing.recomputation import recompute
from kvjax.erasing.reencoding import reencode
from kvjax.erasing.spans import first_start, inside, largest, listed, tokens_at
from kvjax.erasing.steering import KVEraser
from kvjax.models.decoder import Decoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybrid(Method):
    """KVEraser, then R suffix tokens encoded anew over the edited cache.

    Chosen are the R tokens that took most from the span: `rank_by="deviation"`, whose K and V in
    `check_layer` change most once the span is edited, or `"attention"`, which paid the span most
    attention there in the unedited cache. Beyond the paper. Recomputing costs R tokens; ranking
    costs the layers below `check_layer` for the first `reach` suffix tokens, which bounds it
    whatever the suffix (None: for all of them).
    """

    name: ClassVar[str] = "hybrid"
    needs_eraser: ClassVar[bool] = True

    tokens: int = 16
    rank_by: Literal["deviation", "attention"] = "deviation"
    check_layer: int = 1
    reach: int | None = 1024

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"method {self.name!r}, tokens={self.tokens}: allowed are >= 1")
        if self.rank_by not in ("deviation", "attention"):
            raise ValueError(
                f"method {self.name!r}, rank_by={self.rank_by!r}: allowed are deviation, attention"
            )
        if self.reach is not None and self.reach < 1:
            raise ValueError(f"method {self.name!r}, reach={self.reach}: allowed are >= 1 or None")

    def check(self, model: Decoder) -> None:
        refuse_layer(self.name, self.check_layer, model)

    def apply(self, edit: Edit) -> Cache:
        model, cache, extent = edit.model, edit.cache, edit.extent
        tokens, spans = edit.tokens, edit.spans
        edited = KVEraser().apply(edit)
        width = extent.suffix if self.reach is None else min(self.reach, extent.suffix)
        if width == 0:
            return edited
        seen = cache.next_position
        place = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        behind = (place >= first_start(spans, seen)[:, None]) & (place < seen[:, None])
        suffix = listed(behind & ~inside(spans, place), width)
        suffix_tokens = tokens_at(tokens, suffix)
        # Before the first suffix token stand one prefix and one span.
        reads = extent.prefix + extent.span if spans.shape[1] == 1 else None
        layer = self.check_layer
        if self.rank_by == "deviation":
            keys, values = reencode(
                model, edited, suffix_tokens, suffix, reads=reads, layers=layer + 1
            )
            scores = deviation(edited, layer, keys[-1], values[-1], suffix)
        else:
            scores = attention_to(
                model, cache, suffix_tokens, suffix, spans, layer=layer, reads=reads
            )
        count = jnp.full(tokens.shape[0], self.tokens, jnp.int32)
        chosen = largest(scores, suffix, count, min(self.tokens, width))
        return recompute(model, edited, tokens, chosen)
