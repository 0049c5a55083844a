"""Spans of positions, and the lists of positions that a method re-encodes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.budget import bucket_length
from kvjax.whole import check_whole

_BEHIND = 2**30  # sorts behind every position


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extent:
    """Static bounds of an edit, from which its shapes follow; edits of one extent share programs.

    `span`: tokens of the longest span. `prefix`: the latest start of a span. `suffix`: tokens
    behind the first span of a row that belong to none.
    """

    span: int
    prefix: int
    suffix: int

    def __post_init__(self) -> None:
        for name, least in (("span", 1), ("prefix", 1), ("suffix", 0)):
            check_whole(f"extent.{name}", getattr(self, name), least)

    @classmethod
    def needed(
        cls, spans: Int[np.ndarray, "B N 2"], seen: Int[np.ndarray, " B"], capacity: int
    ) -> Extent:
        """The least that holds these spans in rows of `seen` tokens."""
        lengths = spans[:, :, 1] - spans[:, :, 0]
        starts = np.where(lengths > 0, spans[:, :, 0], seen[:, None])
        prefix = max(1, int(np.where(lengths > 0, spans[:, :, 0], 0).max()))
        return cls(
            span=max(1, int(lengths.max())),
            prefix=min(prefix, capacity),
            suffix=max(0, int((seen - starts.min(axis=1) - lengths.sum(axis=1)).max())),
        )

    def bucket(self, capacity: int) -> Extent:
        """This one rounded up, so that similar edits share it."""
        return Extent(
            span=bucket_length(self.span),
            prefix=min(bucket_length(self.prefix), capacity),
            suffix=bucket_length(self.suffix) if self.suffix else 0,
        )

    def check(self, needed: Extent) -> None:
        """Refuses to be less than what an edit needs."""
        for name in ("span", "prefix", "suffix"):
            if (given := getattr(self, name)) < (least := getattr(needed, name)):
                raise ValueError(f"extent.{name}={given}: these spans need {least} or more")


def inside(
    spans: Int[Array, "B N 2"], positions: Int[Array, "*n"], axis: int = 0
) -> Bool[Array, "*n"]:
    """Which positions lie in a span of their row; `axis` is the rows' axis."""
    found = jnp.zeros(positions.shape, bool)
    for start, stop in _bounds(spans, positions.ndim, axis):
        found |= (positions >= start) & (positions < stop)
    return found


def removed_before(
    spans: Int[Array, "B N 2"], positions: Int[Array, "*n"], axis: int = 0
) -> Int[Array, "*n"]:
    """How many positions of spans lie before each position."""
    count = jnp.zeros(positions.shape, jnp.int32)
    for start, stop in _bounds(spans, positions.ndim, axis):
        count += jnp.clip(positions - start, 0, jnp.maximum(stop - start, 0))
    return count


def first_start(spans: Int[Array, "B N 2"], seen: Int[Array, " B"]) -> Int[Array, " B"]:
    """Where the first span of each row begins; `seen` in rows that have none."""
    starts = jnp.where(spans[:, :, 1] > spans[:, :, 0], spans[:, :, 0], seen[:, None])
    return jnp.min(starts, axis=1)


def run(start: Int[Array, " B"], stop: Int[Array, " B"], width: int) -> Int[Array, "B M"]:
    """The positions start, ..., stop - 1 of each row, at most `width`; -1 behind them."""
    positions = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    return jnp.where(positions < stop[:, None], positions, -1)


def listed(marked: Bool[Array, "B T"], width: int) -> Int[Array, "B M"]:
    """The first `width` marked positions of each row in ascending order; -1 behind them."""
    place = jnp.arange(marked.shape[1], dtype=jnp.int32)[None]
    return _packed(jnp.where(marked, place, _BEHIND))[:, :width]


def largest(
    scores: Array, positions: Int[Array, "B M"], count: Int[Array, " B"], width: int
) -> Int[Array, "B W"]:
    """The `count` positions of each row with the largest scores, ascending; -1 behind them.

    Equal scores go to the earlier position; scores that are not finite come last.
    """
    ranked = jnp.where((positions >= 0) & jnp.isfinite(scores), scores, -jnp.inf)
    order = jnp.argsort(-ranked, axis=1, stable=True)[:, :width]
    place = jnp.arange(order.shape[1], dtype=jnp.int32)[None]
    picked = jnp.take_along_axis(positions, order, axis=1)
    return _packed(jnp.where((place < count[:, None]) & (picked >= 0), picked, _BEHIND))


def tokens_at(tokens: Int[Array, "B T"], positions: Int[Array, "B M"]) -> Int[Array, "B M"]:
    """The token at each position; any for padding."""
    return jnp.take_along_axis(tokens, jnp.maximum(positions, 0), axis=1)


def without(tokens: Int[Array, "B T"], spans: Int[Array, "B N 2"]) -> Int[Array, "B T"]:
    """The tokens of no span, moved together; those of spans behind them."""
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    gone = inside(spans, jnp.broadcast_to(place, tokens.shape))
    return jnp.take_along_axis(tokens, jnp.argsort(gone, axis=1, stable=True), axis=1)


def _bounds(spans: Int[Array, "B N 2"], ndim: int, axis: int) -> list[tuple[Array, Array]]:
    shape = [1] * ndim
    shape[axis] = spans.shape[0]
    return [
        (spans[:, n, 0].reshape(shape), spans[:, n, 1].reshape(shape))
        for n in range(spans.shape[1])
    ]


def _packed(positions: Int[Array, "B M"]) -> Int[Array, "B M"]:
    ordered = jnp.sort(positions, axis=1)
    return jnp.where(ordered < _BEHIND, ordered, -1)
