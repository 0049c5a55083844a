"""Spans as callers have them, as the array that compiled functions take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.checks import check_integers

type Span = tuple[int, int]
type Spans = Int[Array | np.ndarray, "B N 2"] | Sequence[Sequence[Span]] | Sequence[Span] | Span


def as_spans(given: Spans, batch: int) -> Int[Array | np.ndarray, "B N 2"]:
    """Spans as one array, rows with fewer filled up with (0, 0).

    Raises:
      ValueError: an array of another shape; lists that are not pairs of integers, one at least.
    """
    if isinstance(given, jax.Array | np.ndarray):
        check_integers(given, "spans")
        if given.ndim != 3 or given.shape[0] != batch or given.shape[2] != 2 or not given.shape[1]:
            raise ValueError(f"spans of shape {given.shape}: allowed is ({batch}, N, 2), N >= 1")
        return given
    depth = _depth(given)
    if depth < 3 and batch != 1:
        raise ValueError(f"spans for a cache of {batch} rows: give a list of pairs for each row")
    rows: Any = given if depth >= 3 else [given] if depth == 2 else [[given]]
    if len(rows) != batch:
        raise ValueError(f"spans of {len(rows)} rows: the cache has {batch}")
    found = np.zeros((batch, max(map(len, rows)), 2), np.int32)
    for index, row in enumerate(rows):
        for place, pair in enumerate(row):
            if _depth(pair) != 1 or len(pair) != 2:
                raise ValueError(f"span {pair!r}: allowed are pairs (start, stop)")
            check_integers(np.asarray(pair), "spans")
            if tuple(pair) == (0, 0):
                raise ValueError("span 0:0 is empty: allowed are start < stop")
            found[index, place] = pair
    return found


def ordered(
    spans: Int[np.ndarray, "B N 2"], seen: Int[np.ndarray, " B"]
) -> Int[np.ndarray, "B N 2"]:
    """The spans of each row from left to right, behind those that are none.

    Raises:
      ValueError: spans that are empty, overlap, or lie outside the tokens seen.
    """
    result = np.zeros_like(spans)
    for row, limit in enumerate(seen.tolist()):
        pairs = sorted((a, b) for a, b in spans[row].tolist() if (a, b) != (0, 0))
        for start, stop in pairs:
            if not 0 <= start < stop <= limit:
                raise ValueError(
                    f"span {start}:{stop} of row {row}: allowed are 0 <= start < stop <= {limit}, "
                    "the tokens seen"
                )
        for (a, b), (c, d) in itertools.pairwise(pairs):
            if c < b:
                raise ValueError(f"spans {a}:{b} and {c}:{d} of row {row} overlap: join them")
        if pairs:
            result[row, -len(pairs) :] = pairs
    return result


def sorted_spans(spans: Int[Array, "B N 2"]) -> Int[Array, "B N 2"]:
    """As `ordered`, without its checks: for spans that are not known yet."""
    start = jnp.where(spans[:, :, 1] > spans[:, :, 0], spans[:, :, 0], -1)
    order = jnp.argsort(start, axis=1, stable=True)
    return jnp.take_along_axis(spans, order[:, :, None], axis=1)


def _depth(given: object) -> int:
    if not isinstance(given, Sequence) or isinstance(given, str):
        return 0
    return 1 + max((_depth(part) for part in given), default=0)
