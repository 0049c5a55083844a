"""Contexts around facts and spans: filler sentences up to a length, spans filled to theirs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from eval.erasing.samples import CountTokens, Part
from eval.tasks import filling


@dataclasses.dataclass(frozen=True)
class Placed:
    """A sentence, or a span, at a depth of the context: 0 its start, 1 its end."""

    text: str
    depth: float
    erased: bool = False


def span_text(core: Sequence[str], stream: Iterator[str], tokens: int, count: CountTokens) -> str:
    """The sentences of `core`, and filler before and behind them, up to `tokens` tokens.

    Raises:
      ValueError: `core` alone is longer.
    """
    sentences = [f"{sentence.rstrip()} " for sentence in core]
    if (least := count("".join(sentences))) > tokens:
        raise ValueError(f"span_tokens={tokens}: too short for this suite; allowed are >= {least}")
    before: list[str] = []
    behind: list[str] = []
    for number in itertools.count():
        sentence = next(stream).replace("\n", " ")
        side = before if number % 2 else behind
        if count("".join([*before, *sentences, *behind, sentence])) > tokens:
            break
        side.append(sentence)
    return "".join([*before, *sentences, *behind])


def context(
    stream: Iterator[str],
    placed: Sequence[Placed],
    length: int,
    count: CountTokens,
    introduction: str = "",
) -> tuple[Part, ...]:
    """Sentences of `stream` up to `length` tokens in all, what is placed between them in order.

    Raises:
      ValueError: a length that has no room for what is placed.
    """
    ordered = sorted(placed, key=lambda one: one.depth)
    used = sum(count(one.text) for one in placed) + count(introduction)
    filling.check_room("this suite", length, used)
    sentences = filling.fill(stream, lambda s: used + count("".join(s)), length, lambda s: [])
    parts: list[Part] = []

    def add(text: str, erased: bool = False) -> None:
        if not text:
            return
        if parts and not erased and not parts[-1].erased:
            text = parts.pop().text + text
        parts.append(Part(text, erased))

    add(introduction)
    start = 0
    for one in ordered:
        stop = max(start, filling.break_at_depth(sentences, False, one.depth))
        add("".join(sentences[start:stop]))
        add(one.text if one.text.endswith((" ", "\n")) else one.text + " ", one.erased)
        start = stop
    add("".join(sentences[start:]))
    return tuple(parts)
