"""One example before packing, and its pieces: tokens, and which of them are to be predicted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NotRequired, Protocol, TypedDict

import numpy as np


class Example(TypedDict):
    """Token ids [n] int32, and `targets` [n] bool: whether a token is to be predicted.

    `parts` [n] int32 says what a token belongs to, in examples of which a span is erased.
    """

    tokens: np.ndarray
    targets: np.ndarray
    parts: NotRequired[np.ndarray]


class Piece(TypedDict):
    """Token ids [n] int32, and `labels` [n] bool: whether the prediction made there counts."""

    tokens: np.ndarray
    labels: np.ndarray
    parts: NotRequired[np.ndarray]


class Source(Protocol):
    """Examples by index, the same on every machine; Grain's RandomAccessDataSource."""

    @property
    def identity(self) -> str:
        """What tells a source from another one, wherever its files lie."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Example: ...


def example(parts: Iterable[tuple[list[int], int, int]]) -> Example:
    """Joins (tokens, start, stop) of which the tokens from start to stop are to be predicted."""
    tokens: list[int] = []
    targets: list[bool] = []
    for ids, start, stop in parts:
        tokens += ids
        targets += [start <= i < stop for i in range(len(ids))]
    return Example(tokens=np.asarray(tokens, np.int32), targets=np.asarray(targets, bool))


def pieces(whole: Example, length: int, long: str = "cut") -> list[Piece]:
    """The pieces of at most `length` tokens that an example is trained on.

    A longer example is cut every `length` tokens, or with `long="drop"` left out. In every piece
    `labels[t]` says that token t + 1 is to be predicted from token t, so that it is False for the
    last token. Pieces in which nothing is to be predicted are left out.
    """
    tokens, targets = whole["tokens"], whole["targets"]
    if long == "drop" and len(tokens) > length:
        return []
    found = []
    for start in range(0, len(tokens), length):
        labels = np.append(targets[start + 1 : start + length], False)
        if labels.any():
            piece = Piece(tokens=tokens[start : start + length], labels=labels)
            if "parts" in whole:
                piece["parts"] = whole["parts"][start : start + length]
            found.append(piece)
    return found
