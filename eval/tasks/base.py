"""What every task produces, and how a task is declared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eval.haystacks import Haystack

type CountTokens = Callable[[str, str, str], int]
"""Tokens of the whole rendered prompt, given context, question and answer prefix."""


class Absent(ValueError):
    """A subset that cannot be made for want of a file; the report lists it with this reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One question about one context.

    The user turn is `context`, a line break, `question`; the reply starts with `answer_prefix`.
    Samples that follow one another and have the same context share one prefill.
    """

    id: str
    task: str  # with its subset: "needle", "ruler/niah_single_1", "longbench/qasper"
    haystack: str  # kind of text around the answer; "documents" for samples read from files
    seed: int
    depth: float | None  # where the answer was asked to lie: 0 the context's start, 1 its end
    length: int | None  # tokens asked for, chat template included; None: as long as it came
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    chat: bool = True  # False: the prompt is plain text, as few-shot and completion tasks want it
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One sample to generate. The same request gives the same sample, on any machine."""

    subset: str  # "" for a task without subsets
    haystack: Haystack | None  # None where the subset brings its own text
    length: int
    depth: float | None
    seed: int
    count_tokens: CountTokens
    path: Path | None = None  # file of questions, for the subsets that need one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Where samples come from and how an answer is scored.

    Exactly one of `make` and `load` is given. `make(request)` raises ValueError where the length
    cannot be met within 2 %, Absent where its file is missing. `load(path, subset)` returns every
    sample of a file or directory in its order, and raises ValueError naming line and field.
    `score(sample, answer)` is in [0, 1].
    """

    name: str
    summary: str
    score: Callable[[Sample, str], float]
    make: Callable[[Request], Sample] | None = None
    load: Callable[[Path, str], list[Sample]] | None = None
    # The file with a subset's samples, where no other subset may be read from it; None for a subset
    # that needs no file. Raises Absent as `load` does.
    source: Callable[[Path, str], Path | None] | None = None
    subsets: tuple[str, ...] = ()
    depths: bool = False  # whether a config chooses depths; else the seed draws them
    # Haystack kinds a subset is defined with, where the config names none; () for one that brings
    # its own text whatever the config says.
    haystacks: Callable[[str], tuple[str, ...]] = lambda subset: ("prose",)


def string_match(sample: Sample, text: str) -> float:
    """Share of the answers that occur in `text`, case ignored (RULER's string_match_all)."""
    return sum(a.lower() in text.lower() for a in sample.answers) / len(sample.answers)


def string_match_any(sample: Sample, text: str) -> float:
    """1 where any of the answers occurs in `text`, case ignored (RULER's string_match_part)."""
    return float(any(a.lower() in text.lower() for a in sample.answers))
