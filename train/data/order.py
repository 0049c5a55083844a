"""The order of a source's examples: shuffled, and anew in every epoch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from train.data.examples import Example, Source

# Grain draws from at least 2^16 places until it hits one that there is: of ten examples, for some
# milliseconds each time. And of 4^k + 1 examples its version 0.2.18 gives one twice and one never.
# Permutations are listed as long as they take little memory.
_LISTED = 2**22
_ENDLESS = 2**62


def endless(source: Source, seed: int) -> Any:
    """A Grain MapDataset without end in which each epoch has every example once."""
    import grain

    if len(source) > _LISTED:
        return grain.MapDataset.source(source).shuffle(seed=seed).repeat()
    return grain.MapDataset.source(_Epochs(source, seed))


class _Epochs:
    """Epoch after epoch of a short source, each in a permutation of its own."""

    def __init__(self, source: Source, seed: int):
        self._source = source
        self._seed = seed
        self._permutation = functools.lru_cache(2)(self._drawn)

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> Example:
        epoch, place = divmod(index, len(self._source))
        return self._source[int(self._permutation(epoch)[place])]

    def _drawn(self, epoch: int) -> np.ndarray:
        numbers = np.arange(len(self._source), dtype=np.int32)
        return np.random.default_rng([self._seed, epoch]).permutation(numbers)
