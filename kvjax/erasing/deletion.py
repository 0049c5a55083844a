"""Methods that compute no token again: leave, mask, delete and shift."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.cache import Cache, edits
from kvjax.cache.entries import entry_positions
from kvjax.cache.rerotate import rerotate
from kvjax.erasing.method import Edit, Method
from kvjax.erasing.spans import inside, removed_before
from kvjax.models.decoder import Decoder


def delete(cache: Cache, spans: Int[Array, "B N 2"]) -> Cache:
    """The cache without the spans' entries; what stays keeps its position."""
    return edits.drop(cache, inside(spans, entry_positions(cache), axis=1))


def delete_and_shift(model: Decoder, cache: Cache, spans: Int[Array, "B N 2"]) -> Cache:
    """The cache without the spans' entries, those behind them moved up.

    Keys are turned from position p to p minus the erased tokens before p, with the model's own
    frequencies; values have no position. Keys before the first span are unchanged to the bit.
    """
    kept = delete(cache, spans)
    old = entry_positions(kept)
    new = jnp.where(old < 0, -1, old - removed_before(spans, old, axis=1))
    removed = removed_before(spans, kept.next_position)
    return rerotate(model, kept, new, kept.next_position - removed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoErase(Method):
    """The cache as it is: the lower bound."""

    name: ClassVar[str] = "none"

    def apply(self, edit: Edit) -> Cache:
        return edit.cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask(Method):
    """The span's slots are never attended to again; everything else stays where it is.

    They are taken out of the cache, which is the same to attention and gives the slots back.
    """

    name: ClassVar[str] = "mask"

    def apply(self, edit: Edit) -> Cache:
        return delete(edit.cache, edit.spans)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeleteAndShift(Method):
    """The span's slots are dropped and the suffix moves up, its keys re-rotated.

    The suffix's states were still computed while attending to the span.
    """

    name: ClassVar[str] = "delete-and-shift"
    moves: ClassVar[bool] = True

    def apply(self, edit: Edit) -> Cache:
        return delete_and_shift(edit.model, edit.cache, edit.spans)
