"""What the page, the Markdown and the terminal say about the runs of one model and protocol."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from eval import families, haystacks, summary
from eval.config import Config
from eval.families import Family
from eval.records import Record, Results, SampleResult
from eval.summary import Pair, Row, Section
from eval.tasks import TASKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Everything computed from samples that may be compared."""

    results: Results
    title: str  # says in what it differs from the other parts
    sections: dict[Section, list[SampleResult]]
    rows: dict[Section, list[Row]]
    families: list[Family]
    pairs: list[Pair]  # of all families, then of all sections
    comparisons: list[Pair]  # of the best evicting policy with the others
    against_full: list[Pair]  # of every policy with the full cache
    best: dict[Any, str]  # "best" or "like" it, by what `_place` says of a row

    def verdict(self, row: Row) -> str:
        """Whether its policy is the "best" evicting one, or "like" it: not significantly worse."""
        return self.best.get(_place(row), "")

    @property
    def alone(self) -> list[Section]:
        """Sections that are in no family's table."""
        taken = {section for family in self.families for section in family.sections}
        return [section for section in self.sections if section not in taken]


def parts(results: Results | Sequence[Results]) -> list[Part]:
    """One part for every given results, titled by model, protocol and what else differs."""
    runs = [results] if isinstance(results, Results) else list(results)
    new_tokens = len({run.config.max_new_tokens for run in runs}) > 1
    seeds = len({run.config.seed for run in runs}) > 1
    found = []
    for run in runs:
        config = run.config
        title = f"{config.model}, question {config.question}"
        if new_tokens:
            title += f", {answer_length(config)}"
        if seeds:
            title += f", seed {config.seed}"
        rows = summary.rows(run)
        tables = families.families(run, rows)
        by_section = summary.sections(run)
        grouped: dict[Section, list[Row]] = {section: [] for section in by_section}
        for row in rows:
            grouped[Section(task=row.task, haystack=row.haystack, length=row.length)].append(row)
        pairs = [*(pair for table in tables for pair in table.pairs), *summary.pairwise(run)]
        every = [*(row for table in tables for row in table.means), *rows]
        comparisons = summary.comparisons(every, pairs)
        found.append(
            Part(
                results=run,
                title=title,
                sections=by_section,
                rows=grouped,
                families=tables,
                pairs=pairs,
                comparisons=comparisons,
                against_full=summary.against_full(pairs),
                best=_verdicts(every, comparisons),
            )
        )
    return found


def warnings(part: Part) -> list[str]:
    """What a reader has to know before the scores, one sentence each."""
    results = part.results
    found = []
    done, wanted = len(results.samples), planned(results.config, results.absent)
    if wanted is None and results.planned:  # the number was in the files, when they were read
        wanted = sum(results.planned.values())
    if wanted is not None and done < wanted:
        found.append(f"The run is not finished: {done} of {wanted} planned samples are there.")
    if any(row.score is None for rows in part.rows.values() for row in rows):
        found.append("Not every policy was run at every budget; what was not has a dash.")
    cut: dict[str, list[int]] = {}
    for sample in results.samples:
        cut.setdefault(sample.task, []).append(sample.cut_tokens)
    found += [
        f"{task}: {sum(map(bool, tokens))} of {len(tokens)} contexts were longer than allowed; "
        f"their middle was cut, {max(tokens)} tokens at most."
        for task, tokens in cut.items()
        if any(tokens)
    ]
    left_out = {s.task: note for s in results.samples if (note := s.metadata.get("left_out"))}
    found += [f"{task}: {note}." for task, note in left_out.items()]
    found += [
        f"The {what} differ in {differing}; their scores stand side by side all the same."
        for what in ("runs", "shards", "resumptions")
        if (differing := results.environment.get(f"differs between {what}"))
    ]
    if results.absent:
        found.append(f"{_count(len(results.absent), 'task')} could not be run; see Absent tasks.")
    if failures := len(results.failures):
        found.append(f"{_count(failures, 'answer')} failed and counted as wrong; see Failures.")
    return found


def failures(results: Results) -> dict[tuple[str, str, str], list[str]]:
    """Ids of the samples that failed by error, policy and budget."""
    found: dict[tuple[str, str, str], list[str]] = {}
    pairs: list[tuple[SampleResult, Record]] = results.failures
    for sample, record in pairs:
        key = (record.error or "", record.policy, record.budget)
        found.setdefault(key, []).append(sample.id)
    return found


def planned(config: Config, absent: Sequence[tuple[str, str]]) -> int | None:
    """Samples that `config` asks for; None where only the tasks' files can tell."""
    missing = {name for name, _ in absent}
    samples: dict[tuple[object, ...], int] = {}
    for given in config.tasks:
        task = TASKS[given.name]
        if task.make is None or given.samples is None:
            return None
        for subset in given.subsets or task.subsets or ("",):
            name = f"{task.name}/{subset}" if subset else task.name
            own = task.haystacks(subset)
            kinds = (given.haystacks or own) if own else ("own",)
            if name in missing:
                continue
            for cell in itertools.product(kinds, given.lengths, given.depths or (None,)):
                key = (name, *cell)
                samples[key] = max(samples.get(key, 0), given.samples)
    return sum(samples.values())


def heading(task: str, haystack: str, length: int | None) -> str:
    """ "needle in prose at 4096 tokens"; a haystack that is the task's own is left out."""
    shown = task
    if haystack in haystacks.KINDS or haystack.startswith("file:"):
        shown += f" in {haystack}"
    return shown if length is None else f"{shown} at {length} tokens"


def answer_length(config: Config) -> str:
    if config.max_new_tokens is None:
        return "as many new tokens as each task allows"
    return f"at most {config.max_new_tokens} new tokens"


def _place(row: Row) -> tuple[Any, ...]:
    return row.task, row.haystack, row.length, row.budget, row.policy


def _verdicts(rows: Sequence[Row], comparisons: Sequence[Pair]) -> dict[Any, str]:
    """By `_place`; where no evicting policy scores at all, none is the best."""
    there = [row for row in rows if row.policy != "full" and row.score is not None]
    top: dict[Any, float] = {}
    for row in there:
        key = _place(row)[:-1]
        top[key] = max(top.get(key, 0.0), row.score.mean if row.score else 0.0)
    found = {
        (pair.task, pair.haystack, pair.length, pair.budget, pair.second): "like"
        for pair in comparisons
        if not pair.difference.significant
    }
    found = {place: verdict for place, verdict in found.items() if top.get(place[:-1])}
    for row in there:
        if row.score and 0 < row.score.mean == top[_place(row)[:-1]]:
            found[_place(row)] = "best"
    return found


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
