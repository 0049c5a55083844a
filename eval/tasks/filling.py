"""Filling a prompt up to its length, and putting needles between the sentences that fill it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

_TOLERANCE = 0.02


def check_room(name: str, length: int, least: int) -> None:
    """Refuses a `length` below the tokens that sample `name` has before anything is filled in."""
    if least > length:
        raise ValueError(f"length={length}: too short for {name}; allowed are lengths >= {least}")


def check_filled(length: int, tokens: int) -> None:
    """Refuses a prompt of less than 98 % of `length`."""
    if tokens < (1 - _TOLERANCE) * length:
        raise ValueError(f"length={length}: too short to be met within 2 %; allowed is more")


def most(count: Callable[[int], int], length: int, available: int | None = None) -> int:
    """The largest n, of at most `available`, for which count(n) is at most `length`.

    count(n) grows with n. It is called a few times above the answer and then by bisection, so that
    long contexts need few calls of the tokenizer. count(0) is taken to fit.
    """
    limit = math.inf if available is None else available
    least = used = count(0)
    low = high = 0
    while used < length and high < limit:
        per_unit = (used - least) / high if high else max(used, 1)
        low, step = high, max(1, math.floor((length - used) / max(per_unit, 1e-3)))
        high = int(min(high + step, limit))
        used = count(high)
    return high if used <= length else _last(lambda n: count(n) <= length, low, high - 1)


def fill(
    stream: Iterator[str],
    count: Callable[[Sequence[str]], int],
    length: int,
    cuts: Callable[[str], Sequence[str]],
) -> list[str]:
    """The most pieces of `stream` that fit; where more than 1 % is missing, a part of the next.

    `cuts` gives the parts of a piece, from the shortest to the longest.
    """
    drawn: list[str] = []

    def first(number: int) -> list[str]:
        drawn.extend(itertools.islice(stream, max(0, number - len(drawn))))
        return drawn[:number]

    kept = first(most(lambda n: count(first(n)), length))
    if count(kept) >= 0.99 * length:
        return kept
    return kept + longest_cut(
        lambda part: count([*kept, part]), length, cuts(first(len(kept) + 1)[-1])
    )


def longest_cut(count: Callable[[str], int], length: int, parts: Sequence[str]) -> list[str]:
    """The longest of `parts` with which the prompt still fits, as a list of one; or no part."""
    end = _last(lambda n: n == 0 or count(parts[n - 1]) <= length, 0, len(parts))
    return list(parts[end - 1 : end]) if end else []


def sentence_cuts(sentence: str) -> list[str]:
    """The beginnings of a sentence, closed with a full stop and a line break."""
    words = sentence.split()
    ends = range(1, len(words))
    return [" ".join(words[:end]).rstrip(",;:.") + ".\n" for end in ends]


def line_cuts(line: str) -> list[str]:
    """The beginnings of a line, character by character."""
    return [line[:end] + "\n" for end in range(1, len(line.rstrip()))]


def breaks(sentences: Sequence[str], own_lines: bool) -> list[int]:
    """Indices at which a needle may be inserted: before the first, and after a line or sentence."""
    found = [0] + [i + 1 for i, s in enumerate(sentences) if s.endswith("\n") or not own_lines]
    return found if found[-1] == len(sentences) else [*found, len(sentences)]


def break_at_depth(sentences: Sequence[str], own_lines: bool, depth: float) -> int:
    """The break closest to `depth`, a share of the characters."""
    ends = [0, *itertools.accumulate(len(s) for s in sentences)]
    target = depth * ends[-1]
    return min(breaks(sentences, own_lines), key=lambda i: (abs(ends[i] - target), i))


def drawn_breaks(sentences: Sequence[str], own_lines: bool, number: int, seed: int) -> list[int]:
    """`number` breaks in ascending order, drawn as RULER draws them.

    Lines: different ones, each as likely, never after the last. Sentences: the shares of the
    sentences nearest to `number` of forty depths evenly spaced over [0, 100] %. (RULER's niah.py
    and variable_tracking.py.) The same `seed` and number of sentences give the same breaks.
    """
    rng = random.Random(seed)
    if not own_lines:
        depths = rng.sample([round(100 * i / 39) for i in range(40)], number)
        return sorted(int(len(sentences) * depth / 100) for depth in depths)
    found = breaks(sentences, own_lines)
    places = found[:-1] or found
    # A text with too few lines is too short for any length asked for; it is only counted.
    draw = rng.sample if len(places) >= number else rng.choices
    return sorted(draw(places, k=number))


def insert(
    sentences: Sequence[str], needles: Sequence[str], at: Sequence[int], own_lines: bool
) -> tuple[str, list[list[int]]]:
    """The text with `needles` at the ascending indices `at`, and their spans of characters."""
    text, start, spans = "", 0, []
    for needle, stop in zip(needles, at, strict=True):
        text += "".join(sentences[start:stop])
        if own_lines and text and not text.endswith("\n"):
            text = text.rstrip() + "\n"
        spans.append([len(text), len(text) + len(needle)])
        text += needle + ("\n" if own_lines else " ")
        start = stop
    return (text + "".join(sentences[start:])).rstrip(), spans


def shifted(spans: Sequence[Sequence[int]], by: int) -> list[list[int]]:
    """Spans of a text in the text that has `by` more characters before it."""
    return [[start + by, end + by] for start, end in spans]


def _last(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest n in [low, high] that fits, where `low` does and no n beyond a misfit does."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
