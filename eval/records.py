"""What a run leaves behind: one record per sample, policy and budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from eval.config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One policy's answer to one sample at one budget, with its cost.

    A failed answer has `error` and score 0. Speeds and times are of the batch in which `rows`
    policies decoded side by side; compilation is in none of them.
    """

    policy: str
    budget: str  # as in the config; "full" for the full cache
    budget_tokens: int  # entries per KV head
    answer: str = ""
    score: float = 0.0
    error: str | None = None
    cache_bytes: int = 0  # sum of the sizes of this row's arrays
    alive_bytes: int = 0  # of the entries in them after compression
    kept_tokens: float = 0.0  # entries per KV head after compression, mean over layers and heads
    peak_bytes: int = 0  # most KV bytes alive at once: for an evicting policy the full cache too
    compress_seconds: float = 0.0
    question_seconds: float = 0.0
    decode_seconds: float = 0.0
    tokens_per_second: float | None = None  # decode steps per second
    generated_tokens: int = 0
    rows: int = 0
    needle_kept: float | None = None  # share of the needle's entries that stayed
    kept_profile: tuple[float, ...] = ()  # share kept, over equal stretches of the prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleResult:
    """Everything about one sample; `records` in the order of the run, the full cache first."""

    id: str
    task: str
    haystack: str
    length: int | None  # tokens asked for
    depth: float | None
    seed: int
    prompt_tokens: int  # prefilled; compressed afterwards
    question_tokens: int
    cut_tokens: int  # left out of the middle of a context too long for the model or the config
    max_new_tokens: int
    question: str
    answers: tuple[str, ...]
    excerpt: str  # the context around the needle
    needle_tokens: tuple[tuple[int, int], ...]  # where the needles lie in the prompt
    metadata: Mapping[str, Any]
    prefill_seconds: float  # of its batch
    model_seconds: float  # of all calls to the model for its batch, compilation left out
    wall_seconds: float  # of its batch, compilation left out
    batch: int  # samples that shared these times
    records: tuple[Record, ...]
    environment: int = 0  # of `Results.environments`
    context: str = ""  # the same for samples whose answers stand or fall with one context

    @property
    def failed(self) -> bool:
        """Whether any answer failed; a run that goes on asks such a sample again."""
        return any(record.error is not None for record in self.records)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """A run, finished or not."""

    config: Config
    environment: Mapping[str, Any]  # all that the samples ran on, side by side
    prompt: Mapping[str, Any]  # template text and end tokens
    samples: tuple[SampleResult, ...]
    absent: tuple[tuple[str, str], ...] = ()  # tasks without samples, and why
    environments: tuple[Mapping[str, Any], ...] = ()  # each on its own
    identity: Mapping[str, str] = dataclasses.field(default_factory=dict)  # see eval.identity
    planned: Mapping[str, int] = dataclasses.field(default_factory=dict)  # samples of every task

    @property
    def failures(self) -> list[tuple[SampleResult, Record]]:
        return [(s, r) for s in self.samples for r in s.records if r.error is not None]

    @property
    def overhead(self) -> float | None:
        """Share of the run's time, compilation left out, that was not the model's own calls."""
        wall = sum(s.wall_seconds / s.batch for s in self.samples)
        model = sum(s.model_seconds / s.batch for s in self.samples)
        return 1 - model / wall if wall else None
