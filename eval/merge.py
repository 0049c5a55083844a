"""Journals of one or several runs into the results of each model and protocol."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval import config as config_module
from eval import environments, identity
from eval.config import Config
from eval.journal import FORMAT, SAMPLES_FILE, joined, journals, numbered, read_journal
from eval.records import Record, Results, SampleResult

# Of a sample, what any run that asks the same has to agree in; times and batches differ.
_SAME = (
    "task", "haystack", "length", "depth", "seed", "prompt_tokens", "question_tokens",
    "cut_tokens", "question", "answers",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What the journals of one directory hold."""

    name: str  # the directory, as it was given
    results: Results
    config_hash: str


def read(directory: str | Path) -> Run:
    """All journals of a run, those of its shards together; finished or not.

    Raises:
      ValueError: no journal, one of another format or config, a damaged line.
    """
    directory = Path(directory)
    paths = journals(directory)
    if not paths:
        raise ValueError(f"run {str(directory)!r}: no {SAMPLES_FILE} there; give eval's --output")
    headers: list[tuple[Path, dict[str, Any]]] = []
    shards: list[list[SampleResult]] = []
    known: list[dict[str, Any]] = []
    for path in paths:
        try:
            header, samples = read_journal(path)
        except ValueError as error:
            # Its advice is for the command that writes.
            raise ValueError(str(error).partition("; give --overwrite")[0]) from error
        if header is None:  # killed before its first line was whole
            continue
        if header.get("format") != FORMAT:
            raise ValueError(
                f"{path} has format {header.get('format')}; allowed is {FORMAT}: run it again"
            )
        headers.append((path, header))
        shards.append(numbered(header, samples.values(), known))
    if not headers:
        raise ValueError(f"run {str(directory)!r}: its {SAMPLES_FILE} is empty")
    (first_path, first), *others = headers
    for path, header in others:
        if header.get("config_hash") != first.get("config_hash"):
            raise ValueError(f"{path} and {first_path} are of different configs; give each its own")
        if names := identity.differing(first.get("identity", {}), header.get("identity", {})):
            raise ValueError(f"{path} and {first_path} are not of the same {', '.join(names)}")
    # In turns, as the contexts were dealt out.
    turns = itertools.zip_longest(*shards)
    found = tuple(joined(s for turn in turns for s in turn if s).values())
    try:
        config = config_module.from_mapping(first["config"])
        results = Results(
            config=config,
            environment=environments.joined(
                environments.used(known, [s.environment for s in found]),
                "shards" if others else "resumptions",
            ),
            environments=tuple(known),
            prompt=dict(first["prompt"]),
            samples=found,
            identity=_union([header.get("identity", {}) for _, header in headers]),
            planned=_most([header.get("planned", {}) for _, header in headers]),
            absent=tuple((str(task), str(reason)) for task, reason in first["absent"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{first_path} line 1 cannot be read: {error}") from error
    return Run(name=str(directory), results=results, config_hash=str(first.get("config_hash")))


def merge(runs: Sequence[Run]) -> list[Results]:
    """Runs of one model, protocol, answer length and seed as one; others apart, in their order.

    A merged run has every policy and budget that any of its runs has for a sample. Where several
    have the same answer of a policy, the first one's costs stand, and an answer stands where
    another run failed.

    Raises:
      ValueError: two runs disagree about a sample, about a policy's answer to it, or in their
        prompt template.
    """
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        config = run.results.config
        key = (config.model, config.question, config.max_new_tokens, config.seed)
        groups.setdefault(key, []).append(run)
    return [group[0].results if len(group) == 1 else _merged(group) for group in groups.values()]


def _merged(runs: Sequence[Run]) -> Results:
    first = runs[0]
    for run in runs[1:]:
        if run.results.prompt != first.results.prompt:
            raise ValueError(
                f"runs {first.name} and {run.name} differ in their prompt template or end tokens; "
                "report them apart"
            )
        if names := identity.differing(first.results.identity, run.results.identity):
            raise ValueError(
                f"runs {first.name} and {run.name} are not of the same {', '.join(names)}; "
                "report them apart"
            )
    config = _config([run.results.config for run in runs])
    samples: dict[str, SampleResult] = {}
    origin: dict[Any, str] = {}
    known: list[dict[str, Any]] = []
    for run in runs:
        for sample in _renumbered(run.results, known):
            earlier = samples.get(sample.id)
            samples[sample.id] = _sample(earlier, sample, run.name, origin)
    there = {sample.task for sample in samples.values()}
    absent = dict(pair for run in runs for pair in run.results.absent)
    environment = environments.joined([run.results.environment for run in runs], "runs")
    return Results(
        config=config,
        environment=environment
        | {
            "runs": ", ".join(run.name for run in runs),
            "config": ", ".join(dict.fromkeys(run.config_hash for run in runs)),
        },
        environments=tuple(known),
        identity=_union([run.results.identity for run in runs]),
        planned=_most([run.results.planned for run in runs]),
        prompt=first.results.prompt,
        samples=tuple(_ordered(sample, config) for sample in samples.values()),
        absent=tuple((task, why) for task, why in absent.items() if task not in there),
    )


def _config(configs: Sequence[Config]) -> Config:
    """The first one with the tasks, policies and budgets of all."""
    return dataclasses.replace(
        configs[0],
        tasks=tuple(dict.fromkeys(task for config in configs for task in config.tasks)),
        policies=tuple({p.label: p for config in configs for p in config.policies}.values()),
        budgets=tuple(dict.fromkeys(b for config in configs for b in config.budgets)),
    )


def _sample(
    earlier: SampleResult | None, sample: SampleResult, run: str, origin: dict[Any, str]
) -> SampleResult:
    """`sample` of `run` with the records that earlier runs have of it; `origin`: who has which."""
    found: dict[tuple[str, str], Record] = {}
    if earlier is not None:
        found = {(r.policy, r.budget): r for r in earlier.records}
        _check_same(earlier, sample, origin[sample.id], run)
    else:
        origin[sample.id] = run
    for record in sample.records:
        column = (record.policy, record.budget)
        other = found.get(column)
        if other is None or (other.error is not None and record.error is None):
            found[column] = record
            origin[sample.id, *column] = run
        elif record.error is None and (other.answer, other.score) != (record.answer, record.score):
            raise ValueError(
                f"sample {sample.id}: policy {record.policy} at budget {record.budget} answered "
                f"{_short(other)} in {origin[sample.id, *column]} and {_short(record)} in {run}; "
                "merge runs that agree"
            )
    records = tuple(found.values())
    if earlier is None:
        return dataclasses.replace(sample, records=records)
    # Each run's share of its batch's time, as the first batch would show it.
    share = earlier.batch / sample.batch
    return dataclasses.replace(
        earlier if earlier.prompt_tokens else sample,
        records=records,
        wall_seconds=earlier.wall_seconds + share * sample.wall_seconds,
        model_seconds=earlier.model_seconds + share * sample.model_seconds,
        batch=earlier.batch,
    )


def _check_same(earlier: SampleResult, sample: SampleResult, first: str, second: str) -> None:
    # One that could not be made has no prompt, and nothing to disagree with.
    if not (earlier.prompt_tokens and sample.prompt_tokens):
        return
    pairs = [(name, getattr(earlier, name), getattr(sample, name)) for name in _SAME]
    name = identity.HAYSTACK  # of samples made from one
    if name in earlier.metadata and name in sample.metadata:
        pairs.append((name, earlier.metadata[name], sample.metadata[name]))
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise ValueError(
                f"sample {sample.id} is not the same in {first} and {second}: {name} "
                f"{_cut(repr(ours))} and {_cut(repr(theirs))}; report them apart"
            )


def _ordered(sample: SampleResult, config: Config) -> SampleResult:
    """Its records as one run would have them: the full cache, then budget by budget."""
    budgets = ["full", *map(str, config.budgets)]
    labels = ["full", *(policy.label for policy in config.policies)]

    def place(record: Record) -> tuple[int, int]:
        return _place(budgets, record.budget), _place(labels, record.policy)

    return dataclasses.replace(sample, records=tuple(sorted(sample.records, key=place)))


def _place(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)


def _renumbered(results: Results, known: list[dict[str, Any]]) -> list[SampleResult]:
    """The samples of a run, their environments numbered in `known`, which grows by new ones."""
    given = results.environments or (results.environment,)
    return numbered({"environments": given}, results.samples, known)


def _union(identities: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {name: content for one in identities for name, content in one.items()}


def _most(planned: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Of every task the most that any planned; nothing where one does not say."""
    if not all(planned):
        return {}
    tasks = dict.fromkeys(task for counts in planned for task in counts)
    return {task: max(counts.get(task, 0) for counts in planned) for task in tasks}


def _short(record: Record) -> str:
    return f"{_cut(repr(record.answer))} (score {record.score:g})"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
