"""Where a passage of text stands among tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_SHOWN = 40  # characters of a passage that an error quotes


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text each token completes, special tokens written out; "" inside a character."""
    stream = tokenizer.stream(skip_special_tokens=False)
    texts = [stream.push(token) for token in tokens]
    if texts:
        texts[-1] += stream.flush()
    return texts


def token_span(texts: Sequence[str], start: int, stop: int) -> tuple[int, int]:
    """The tokens (start, stop) that hold a character of text[start:stop], which is not empty.

    A token that only begins a character counts with that character; an empty one elsewhere, as
    some special tokens are, does not extend the span.
    """
    ends = np.cumsum([len(text) for text in texts])
    begins = ends - np.array([len(text) for text in texts])
    inside = (begins < stop) & (np.maximum(ends, begins + 1) > start)
    return int(np.argmax(inside)), len(texts) - int(np.argmax(inside[::-1]))


def occurrences(texts: Sequence[str], passage: str) -> list[tuple[int, int]]:
    """The token span of every place at which the joined texts hold the passage."""
    joined, found, at = "".join(texts), [], -1
    while passage and (at := joined.find(passage, at + 1)) >= 0:
        found.append(token_span(texts, at, at + len(passage)))
    return found


def only_span(texts: Sequence[str], passage: str, first: int = 0) -> tuple[int, int]:
    """The token span of a passage that occurs once; `first` is the position of texts[0].

    Raises:
      ValueError: an empty passage, one that does not occur, or one that occurs several times.
    """
    shown = passage if len(passage) <= _SHOWN else passage[: _SHOWN - 1] + "…"
    if not passage.strip():
        raise ValueError(f"text {shown!r}: it is empty; allowed is a part of what was said")
    found = [(start + first, stop + first) for start, stop in occurrences(texts, passage)]
    if not found:
        raise ValueError(f"text {shown!r} does not occur in tokens {first}:{first + len(texts)}")
    if len(found) > 1:
        places = ", ".join(f"{start}:{stop}" for start, stop in found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ValueError(
            f"text {shown!r} occurs {len(found)} times, at tokens {places}{more}: give one of "
            "these, or more of the text around it"
        )
    return found[0]
