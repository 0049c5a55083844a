"""What every task produces, and how a task is declared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from eval.haystacks import Haystack

type CountTokens = Callable[[str, str, str], int]
"""Tokens of the whole rendered prompt, given context, question and answer prefix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One question about one context.

    The user turn is `context`, a line break, `question`; the reply starts with `answer_prefix`.
    """

    id: str
    task: str
    haystack: str
    seed: int
    depth: float  # where the answer was asked to lie: 0 is the start of the context, 1 its end
    length: int  # tokens asked for, chat template included
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A generator of samples and the score of an answer.

    make(haystack, length, depth, seed, count_tokens) is deterministic in its arguments and raises
    ValueError where `length` cannot be met within 2 %. score(answers, text) is in [0, 1].
    """

    name: str
    summary: str
    make: Callable[[Haystack, int, float, int, CountTokens], Sample]
    score: Callable[[tuple[str, ...], str], float]


def string_match(answers: tuple[str, ...], text: str) -> float:
    """Share of the answers that occur in `text`, case ignored (RULER's string_match_all)."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)
