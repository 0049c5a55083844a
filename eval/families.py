"""Families of tasks (RULER, LongBench): the mean over their subsets, each with the same weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from eval.haystacks import KINDS
from eval.records import Results, SampleResult
from eval.statistics import Estimate, stratified_means
from eval.summary import (
    Column,
    Costs,
    Pair,
    Row,
    Section,
    columns,
    contexts,
    pairs,
    scores,
    sections,
)
from eval.tasks import TASKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Subsets of one family at one length."""

    name: str  # "ruler"
    task: str  # "ruler, mean of 13 tasks", as in its rows and pairs
    haystack: str  # "as defined", or the one that a config gave every subset that takes one
    length: int | None
    sections: tuple[Section, ...]
    # Over the subsets: score and costs have None where a policy lacks one of them.
    means: tuple[Row, ...]
    pairs: tuple[Pair, ...]


def families(results: Results, rows: Sequence[Row]) -> list[Family]:
    """Every family with several subsets, apart by length and, where a config chose, by haystack."""
    by_section = sections(results)
    groups: dict[tuple[str, int | None], list[Section]] = {}
    for section in by_section:
        family, _, subset = section.task.partition("/")
        if subset:
            groups.setdefault((family, section.length), []).append(section)
    cells = {
        (Section(task=r.task, haystack=r.haystack, length=r.length), _column(r)): r for r in rows
    }
    order = columns(results)
    return [
        _family(name, haystack, length, chosen, by_section, cells, order)
        for (name, length), group in groups.items()
        for haystack, chosen in _by_haystack(name, group).items()
        if len(chosen) > 1
    ]


def _by_haystack(family: str, group: Sequence[Section]) -> dict[str, list[Section]]:
    """The subsets as the task defines them, and once more for every other haystack they all have.

    A haystack that a config adds to some subsets only makes no family: those are tables of their
    own. Subsets that bring their own text, whatever the config says, are in every family.
    """
    subsets = list(dict.fromkeys(section.task for section in group))
    if len(subsets) == len(group):
        kinds = {section.haystack for section in group}
        return {kinds.pop() if len(kinds) == 1 else "as defined": list(group)}

    def chosen(haystack: str) -> bool:
        return haystack in KINDS or haystack.startswith("file:")

    def of(kinds: Callable[[str], Sequence[str]]) -> list[Section]:
        return [s for s in group if s.haystack in kinds(s.task) or not chosen(s.haystack)]

    task = TASKS[family]
    found = {"as defined": of(lambda name: task.haystacks(name.partition("/")[2]))}
    for kind in dict.fromkeys(s.haystack for s in group if chosen(s.haystack)):
        found[kind] = of(lambda _, kind=kind: (kind,))  # type: ignore[misc]
    whole = {
        name: sections
        for name, sections in found.items()
        if [section.task for section in sections] == subsets
    }
    if whole.get("as defined") in [s for name, s in whole.items() if name != "as defined"]:
        del whole["as defined"]
    return whole


def _family(
    name: str,
    haystack: str,
    length: int | None,
    chosen: Sequence[Section],
    samples: Mapping[Section, Sequence[SampleResult]],
    cells: Mapping[tuple[Section, Column], Row],
    order: Sequence[Column],
) -> Family:
    strata = [scores(samples[section]) for section in chosen]
    everywhere = [c for c in order if all(c in stratum for stratum in strata)]
    numbers = [contexts(samples[section]) for section in chosen]
    means = _means(strata, numbers, everywhere)
    task = f"{name}, mean of {len(chosen)} tasks"
    place: dict[str, Any] = {"task": task, "haystack": haystack, "length": length}
    rows = []
    for column in order:
        parts = [cells[section, column] for section in chosen]
        rows.append(
            Row(
                **place,
                policy=column[0],
                budget=column[1],
                score=means.get(column),
                failures=sum(row.failures for row in parts),
                costs=_costs([row.costs for row in parts]),
                bounded=any(row.bounded for row in parts),
            )
        )
    return Family(
        name=name,
        task=task,
        haystack=haystack,
        length=length,
        sections=tuple(chosen),
        means=tuple(rows),
        pairs=tuple(pairs(strata, numbers, order, **place)),
    )


def _means(
    strata: Sequence[dict[Column, np.ndarray]],
    numbers: Sequence[np.ndarray],
    everywhere: Sequence[Column],
) -> dict[Column, Estimate]:
    found: dict[Column, Estimate] = {}
    by_mask: dict[tuple[bytes, ...], list[Column]] = {}
    for column in everywhere:
        key = tuple(np.isnan(stratum[column]).tobytes() for stratum in strata)
        by_mask.setdefault(key, []).append(column)
    for group in by_mask.values():
        arrays = [
            np.stack([stratum[c][~np.isnan(stratum[c])] for c in group], axis=1)
            for stratum in strata
        ]
        own = [
            array[~np.isnan(stratum[group[0]])]
            for array, stratum in zip(numbers, strata, strict=True)
        ]
        found |= dict(zip(group, stratified_means(arrays, contexts=own), strict=True))
    return found


def _costs(parts: Sequence[Costs]) -> Costs:
    """Mean of the subsets' means; None where one of them has none."""
    found = {}
    for field in dataclasses.fields(Costs):
        values = [getattr(part, field.name) for part in parts]
        found[field.name] = fmean(values) if None not in values else None
    return Costs(**found)


def _column(row: Row) -> Column:
    return row.policy, row.budget
