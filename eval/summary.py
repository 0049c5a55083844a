"""Samples into rows of a table: one per policy and budget; haystacks and lengths apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from eval.config import Config
from eval.records import Record, Results, SampleResult
from eval.statistics import Difference, Estimate, estimates, paired_differences
from eval.tasks import TASKS

type Column = tuple[str, str]
"""Policy and budget."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Samples whose scores may be averaged."""

    task: str
    haystack: str
    length: int | None  # None: as long as each came


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Means over the samples that did not fail; None where there is none."""

    cache_bytes: float | None = None
    alive_bytes: float | None = None
    peak_bytes: float | None = None
    kept_tokens: float | None = None
    footprint: float | None = None
    prefill_seconds: float | None = None
    compress_seconds: float | None = None
    question_seconds: float | None = None
    decode_seconds: float | None = None
    tokens_per_second: float | None = None
    needle_kept: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Mean score and costs of one policy at one budget; failures are in it as score 0."""

    task: str
    haystack: str
    length: int | None
    policy: str
    budget: str
    score: Estimate | None  # None: no sample was run
    failures: int
    costs: Costs
    bounded: bool = False  # the footprint is an upper bound


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """First - second, two policies at one budget on the samples both have."""

    task: str
    haystack: str
    length: int | None
    budget: str
    first: str
    second: str
    difference: Difference

    def __neg__(self) -> Pair:
        return dataclasses.replace(
            self, first=self.second, second=self.first, difference=-self.difference
        )


def sections(results: Results) -> dict[Section, list[SampleResult]]:
    """In the order of the config, lengths ascending; nothing is averaged across them."""
    found: dict[Section, list[SampleResult]] = {}
    for sample in results.samples:
        key = Section(task=sample.task, haystack=sample.haystack, length=sample.length)
        found.setdefault(key, []).append(sample)
    tasks = _task_order(results.config)
    places: dict[Any, int] = {}
    for key in found:
        places.setdefault((key.task, key.haystack), len(places))

    def place(key: Section) -> tuple[int, int, int]:
        task = tasks.index(key.task) if key.task in tasks else len(tasks)
        return task, places[key.task, key.haystack], key.length or 0

    return {key: found[key] for key in sorted(found, key=place)}


def columns(results: Results) -> list[Column]:
    """(policy, budget) in the order of the config, the full cache first.

    Every policy at every budget, where merged runs have only some of them too.
    """
    seen = dict.fromkeys((r.policy, r.budget) for s in results.samples for r in s.records)
    evicting = [column for column in seen if column[0] != "full"]
    policies = _ordered((p for p, _ in evicting), [p.label for p in results.config.policies])
    budgets = _ordered((b for _, b in evicting), [str(b) for b in results.config.budgets])
    full = [column for column in seen if column[0] == "full"]
    return full + [(policy, budget) for budget in budgets for policy in policies]


def footprint(prompt: int, steps: int, kept: float) -> float:
    """Entries alive times tokens read or written, per KV head and relative to the full cache.

        (sum_{t=1..T} t + sum_{n=1..N} (kept + n)) / (sum_{t=1..T} t + sum_{n=1..N} (T + n))

    T = `prompt`, the tokens prefilled; N = `steps`, those of the question and of the answer. A
    whole prefill holds all of the prompt, whatever is kept of it afterwards, and is in both sums.
    """
    whole = prompt * (prompt + 1) / 2
    appended = steps * (steps + 1) / 2
    return (whole + steps * kept + appended) / (whole + steps * prompt + appended)


def rows(results: Results) -> list[Row]:
    """Every section's table, one after the other, in the order of `columns`."""
    bounded = _evicting_elsewhere(results.config)
    order = columns(results)
    return [
        row
        for section, samples in sections(results).items()
        for row in _rows(section, samples, order, bounded)
    ]


def pairwise(results: Results) -> list[Pair]:
    """Every two policies of a section at every budget, the full cache among them."""
    return [
        pair
        for section, samples in sections(results).items()
        for pair in pairs(
            [scores(samples)], [contexts(samples)], columns(results), **dataclasses.asdict(section)
        )
    ]


def comparisons(rows: Iterable[Row], pairs: Iterable[Pair]) -> list[Pair]:
    """The best policy of every section and budget, the full cache aside, against every other.

    Among equal means the first in the config is called best. The differences are between the
    policies' own samples and not corrected for their number.
    """
    best: dict[Any, str] = {}
    means: dict[Any, float] = {}
    for row in rows:
        key = (row.task, row.haystack, row.length, row.budget)
        if row.policy == "full" or row.score is None:
            continue
        if key not in best or row.score.mean > means[key]:
            best[key], means[key] = row.policy, row.score.mean
    found = []
    for pair in pairs:
        name = best.get((pair.task, pair.haystack, pair.length, pair.budget))
        if "full" in (pair.first, pair.second) or name not in (pair.first, pair.second):
            continue
        found.append(pair if pair.first == name else -pair)
    return found


def against_full(pairs: Iterable[Pair]) -> list[Pair]:
    """Every policy against the full cache; above 0 where evicting scores more."""
    return [-pair for pair in pairs if pair.first == "full"]


def scores(samples: Sequence[SampleResult]) -> dict[Column, np.ndarray]:
    """Score of every sample [n] by policy and budget; NaN where it was not run."""
    found: dict[Column, np.ndarray] = {}
    for index, sample in enumerate(samples):
        for record in sample.records:
            column = (record.policy, record.budget)
            if column not in found:
                found[column] = np.full(len(samples), np.nan)
            found[column][index] = record.score
    return found


def contexts(samples: Sequence[SampleResult]) -> np.ndarray:
    """The number of every sample's context [n]: those that share one stand or fall together."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(s.context or s.id, len(numbers)) for s in samples])


def pairs(
    strata: Sequence[dict[Column, np.ndarray]],
    contexts: Sequence[np.ndarray],
    order: Sequence[Column],
    **place: Any,
) -> list[Pair]:
    """Every two policies that have a budget in common, over one section or several strata.

    `contexts` of every stratum's samples, as `contexts` numbers them.
    """
    common = [c for c in order if all(c in stratum for stratum in strata)]
    found = []
    for budget in dict.fromkeys(budget for _, budget in common if budget != "full"):
        group = [c for c in common if c[1] in ("full", budget)]
        there = {c: [~np.isnan(stratum[c]) for stratum in strata] for c in group}
        # Policies that ran on the same samples share their resamples; others meet pair by pair.
        sets = [group]
        if len({tuple(m.tobytes() for m in masks) for masks in there.values()}) > 1:
            sets = [[a, b] for i, a in enumerate(group) for b in group[i + 1 :]]
        for chosen in sets:
            masks = [
                np.logical_and.reduce([there[c][s] for c in chosen]) for s in range(len(strata))
            ]
            if not all(mask.any() for mask in masks):
                continue
            arrays = [
                np.stack([stratum[c][mask] for c in chosen], axis=1)
                for stratum, mask in zip(strata, masks, strict=True)
            ]
            own = [numbers[mask] for numbers, mask in zip(contexts, masks, strict=True)]
            found += [
                Pair(
                    **place,
                    budget=budget,
                    first=chosen[i][0],
                    second=chosen[j][0],
                    difference=difference,
                )
                for (i, j), difference in paired_differences(arrays, contexts=own).items()
            ]
    return found


def worst(results: Results, limit: int = 6) -> list[SampleResult]:
    """Where evicting loses most of what the full cache scored, over all tasks and haystacks."""

    def lost(sample: SampleResult) -> float:
        full = [r.score for r in sample.records if r.policy == "full" and r.error is None]
        evicted = [r.score for r in sample.records if r.policy != "full"]
        return full[0] - fmean(evicted) if full and evicted else 0.0

    groups: dict[Any, list[SampleResult]] = {}
    for sample in sorted(results.samples, key=lost, reverse=True):
        if lost(sample) > 0:
            groups.setdefault((sample.task, sample.haystack), []).append(sample)
    each = max(1, limit // max(1, len(groups)))
    chosen = sorted((s for group in groups.values() for s in group[:each]), key=lost, reverse=True)
    return chosen[:limit]


def _ordered(names: Iterable[str], known: Sequence[str]) -> list[str]:
    """Each once: as in `known`, then any others as they come."""
    found = dict.fromkeys(names)
    return [name for name in known if name in found] + [n for n in found if n not in known]


def _task_order(config: Config) -> list[str]:
    """Names of all subsets; samples of several processes come in another order."""
    return [
        f"{task.name}/{subset}" if subset else task.name
        for task in config.tasks
        for subset in task.subsets or TASKS[task.name].subsets or ("",)
    ]


def _rows(
    section: Section, samples: Sequence[SampleResult], order: Sequence[Column], bounded: set[str]
) -> list[Row]:
    by_column: dict[Column, list[tuple[SampleResult, Record]]] = {}
    for sample in samples:
        for record in sample.records:
            by_column.setdefault((record.policy, record.budget), []).append((sample, record))
    found = scores(samples)
    means: dict[Column, Estimate] = {}
    by_mask: dict[bytes, list[Column]] = {}
    for column, values in found.items():
        by_mask.setdefault(np.isnan(values).tobytes(), []).append(column)
    numbers = contexts(samples)
    for group in by_mask.values():
        there = ~np.isnan(found[group[0]])
        array = np.stack([found[column][there] for column in group], axis=1)
        means |= dict(zip(group, estimates(array, contexts=numbers[there]), strict=True))
    return [
        Row(
            **dataclasses.asdict(section),
            policy=column[0],
            budget=column[1],
            score=means.get(column),
            failures=sum(r.error is not None for _, r in by_column.get(column, ())),
            costs=_costs([pair for pair in by_column.get(column, ()) if pair[1].error is None]),
            bounded=column[0] in bounded,
        )
        for column in order
    ]


def _costs(good: Sequence[tuple[SampleResult, Record]]) -> Costs:
    def mean(values: Iterable[float | None]) -> float | None:
        there = [value for value in values if value is not None]
        return fmean(there) if there else None

    def used(s: SampleResult, r: Record) -> float | None:
        steps = s.question_tokens + r.generated_tokens
        return footprint(s.prompt_tokens, steps, r.kept_tokens) if s.prompt_tokens else None

    own = ("footprint", "prefill_seconds")
    names = [field.name for field in dataclasses.fields(Costs) if field.name not in own]
    return Costs(
        footprint=mean(used(s, r) for s, r in good),
        prefill_seconds=mean(s.prefill_seconds for s, _ in good),
        **{name: mean(getattr(r, name) for _, r in good) for name in names},
    )


def _evicting_elsewhere(config: Config) -> set[str]:
    """Policies that evict during prefill or while decoding, and hold less than is counted."""
    return {
        policy.label
        for policy in config.policies
        for options in [dict(policy.options)]
        if options.get("prefill") == "chunked" or options.get("decode_interval")
    }
