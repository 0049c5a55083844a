"""The tiny ragged batch, an eraser that changes much, and what every method should make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax.cache.entries import entry_positions
from kvjax.learned.eraser import Eraser, EraserConfig, init_eraser
from tests import tiny
from tests.erasing import by_hand

SPANS = ((9, 17), (4, 14), (2, 4))  # one in each row of 48, 31 and 7 tokens
type Pair = tuple[int, int]


@cache
def eraser(rank: int = 4, *, trained: bool = True) -> Eraser:
    """Adapters of the tiny model; `trained` ones have a B that is not 0."""
    made = init_eraser(EraserConfig(rank=rank, alpha=2.0 * rank), jax.random.key(11), tiny.CONFIG)
    if not trained:
        return made
    arrays = {
        name: 0.3 * jax.random.normal(jax.random.fold_in(jax.random.key(12), index), array.shape)
        if name.endswith(".b")
        else array
        for index, (name, array) in enumerate(made.arrays.items())
    }
    return Eraser(config=made.config, arrays=arrays)


def rows_of(spans: Sequence[Pair] = SPANS) -> np.ndarray:
    """[B, 1, 2]."""
    return np.array(spans, np.int32)[:, None]


def erased(method: str | Any, spans: Any = None, **options: Any) -> kvjax.PaddedCache:
    """The full cache of the ragged batch after the edit."""
    spans = rows_of() if spans is None else spans
    before = options.pop("cache", None) or tiny.full()[1]
    if isinstance(method, str):
        method = kvjax.erasing_method(method, **options)
    return kvjax.erase(tiny.model(), eraser(), before, tiny.tokens(), spans, method=method)


def row_tokens(row: int) -> np.ndarray:
    return tiny.tokens()[row, : tiny.LENGTHS[row]]


def without(tokens: np.ndarray, spans: Sequence[Pair]) -> np.ndarray:
    gone = np.concatenate([np.arange(*span) for span in spans])
    return np.delete(tokens, gone)


@cache
def whole(row: int) -> by_hand.States:
    """The row as it was prefilled."""
    return by_hand.states(tiny.model(), row_tokens(row))


def entries(cache: Any, row: int) -> list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Positions, keys and values of every (layer, head) of one row."""
    positions = np.asarray(entry_positions(cache))[:, row]
    found: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = []
    for layer in range(cache.num_layers):
        view = jax.tree.map(lambda array, at=layer: array[at], cache.views)
        keys, values = (np.asarray(a, np.float64)[row] for a in cache.dense(view)[:2])
        here = []
        for head in range(cache.num_kv_heads):
            held = positions[layer, head] >= 0
            here.append((positions[layer, head][held], keys[head][held], values[head][held]))
        found.append(here)
    return found


def check(
    cache: Any,
    row: int,
    keys: np.ndarray,
    values: np.ndarray,
    tolerance: float = 2e-4,
    held: Callable[[int, int], np.ndarray] | None = None,
) -> None:
    """The row holds exactly these positions with these states [L, K, T, D]; default all."""
    assert int(cache.next_position[row]) == keys.shape[2]
    for layer, heads in enumerate(entries(cache, row)):
        for head, (positions, found_keys, found_values) in enumerate(heads):
            wanted = np.arange(keys.shape[2]) if held is None else held(layer, head)
            np.testing.assert_array_equal(positions, wanted)
            np.testing.assert_allclose(found_keys, keys[layer, head, wanted], atol=tolerance)
            np.testing.assert_allclose(found_values, values[layer, head, wanted], atol=tolerance)
