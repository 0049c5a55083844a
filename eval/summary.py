"""Samples into rows of a table: one per policy and budget, haystacks apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from eval.records import Record, Results, SampleResult
from eval.statistics import Difference, Estimate, estimate, paired_difference

type Pairs = list[tuple[SampleResult, Record]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Mean score and costs of one policy at one budget; failures are in it as score 0."""

    task: str
    haystack: str
    policy: str
    budget: str
    score: Estimate
    failures: int
    # Means over the samples that did not fail; None where all did.
    cache_bytes: float | None
    alive_bytes: float | None
    peak_bytes: float | None
    kept_tokens: float | None
    tokens_per_second: float | None
    prefill_seconds: float | None
    compress_seconds: float | None
    decode_seconds: float | None
    needle_kept: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The best evicting policy of one budget against another one on the same samples."""

    task: str
    haystack: str
    budget: str
    best: str
    other: str
    difference: Difference


def sections(results: Results) -> list[tuple[str, str]]:
    """(task, haystack) in the order of the run; scores are never averaged across them."""
    return list(dict.fromkeys((s.task, s.haystack) for s in results.samples))


def columns(results: Results) -> list[tuple[str, str]]:
    """(policy, budget) in the order of the run, the full cache first."""
    return list(dict.fromkeys((r.policy, r.budget) for s in results.samples for r in s.records))


def rows(results: Results) -> list[Row]:
    """Every section's table, one after the other."""
    return [
        _row(*section, *column, select(results, *section, *column))
        for section in sections(results)
        for column in columns(results)
    ]


def comparisons(results: Results) -> list[Comparison]:
    """Per section and budget: the best policy, the full cache aside, against every other.

    Among equal means the first in the config is called best. The differences are between the
    policies' own samples and not corrected for their number.
    """
    found = []
    for section in sections(results):
        by_budget: dict[str, dict[str, list[float]]] = {}
        for policy, budget in columns(results):
            if policy != "full":
                scores = [r.score for _, r in select(results, *section, policy, budget)]
                by_budget.setdefault(budget, {})[policy] = scores
        for budget, scores_of in by_budget.items():
            best = max(scores_of, key=lambda name: fmean(scores_of[name]))
            found += [
                Comparison(
                    task=section[0],
                    haystack=section[1],
                    budget=budget,
                    best=best,
                    other=other,
                    difference=paired_difference(scores_of[best], scores),
                )
                for other, scores in scores_of.items()
                if other != best
            ]
    return found


def select(results: Results, task: str, haystack: str, policy: str, budget: str) -> Pairs:
    """Samples of one section with the record of one policy and budget, in sample order."""
    return [
        (s, r)
        for s in results.samples
        if (s.task, s.haystack) == (task, haystack)
        for r in s.records
        if (r.policy, r.budget) == (policy, budget)
    ]


def worst(results: Results, limit: int = 4) -> list[SampleResult]:
    """The samples that most evicting policies missed although the full cache found the answer."""

    def missed(sample: SampleResult) -> float:
        return fmean([1 - r.score for r in sample.records if r.policy != "full"] or [0.0])

    answerable = [
        s
        for s in results.samples
        if all(r.score == 1 and r.error is None for r in s.records if r.policy == "full")
    ]
    by_section: dict[Any, list[SampleResult]] = {}
    for sample in sorted(answerable, key=missed, reverse=True):
        if missed(sample):
            by_section.setdefault((sample.task, sample.haystack), []).append(sample)
    each = max(1, limit // max(1, len(by_section)))
    return [sample for group in by_section.values() for sample in group[:each]]


def _row(task: str, haystack: str, policy: str, budget: str, pairs: Pairs) -> Row:
    good = [(s, r) for s, r in pairs if r.error is None]

    def mean(values: Sequence[float | None]) -> float | None:
        there = [value for value in values if value is not None]
        return fmean(there) if there else None

    return Row(
        task=task,
        haystack=haystack,
        policy=policy,
        budget=budget,
        score=estimate([r.score for _, r in pairs]),
        failures=len(pairs) - len(good),
        cache_bytes=mean([r.cache_bytes for _, r in good]),
        alive_bytes=mean([r.alive_bytes for _, r in good]),
        peak_bytes=mean([r.peak_bytes for _, r in good]),
        kept_tokens=mean([r.kept_tokens for _, r in good]),
        tokens_per_second=mean([r.tokens_per_second for _, r in good]),
        prefill_seconds=mean([s.prefill_seconds for s, _ in good]),
        compress_seconds=mean([r.compress_seconds for _, r in good]),
        decode_seconds=mean([r.decode_seconds for _, r in good]),
        needle_kept=mean([r.needle_kept for _, r in good]),
    )
