"""Which samples a config asks for, in the order of the run, each made when its turn comes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from eval import haystacks
from eval.config import Config, TaskConfig
from eval.stages import Engine
from eval.tasks import TASKS
from eval.tasks.base import Absent, CountTokens, Request, Sample, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """A sample to come. Neighbours with the same `context_key` share one context."""

    id: str
    task: str
    haystack: str
    seed: int
    length: int | None
    depth: float | None
    context_key: str
    make: Callable[[], Sample]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Every sample of a run, and the tasks that have none, with the reason."""

    samples: tuple[Planned, ...]
    absent: tuple[tuple[str, str], ...]
    contents: dict[str, str]  # hash of every text and file that samples are made of, by its name

    @property
    def counts(self) -> dict[str, int]:
        """Samples of every task."""
        return dict(Counter(planned.task for planned in self.samples))

    def contexts(self) -> list[list[Planned]]:
        """The samples, those of one context together."""
        groups = itertools.groupby(self.samples, key=lambda planned: planned.context_key)
        return [list(group) for _, group in groups]


def plan(config: Config, count_tokens: CountTokens) -> Plan:
    """Reads the files of all tasks and makes the first sample of every cell, to check them.

    Raises:
      ValueError: a file that cannot be read or has the samples of two subsets, a length too short
        for its task, a metric without its package.
    """
    samples: list[Planned] = []
    absent: dict[str, str] = {}
    contents: dict[str, str] = {}
    for task_config in config.tasks:
        task = TASKS[task_config.name]
        _check_sources(task_config, task)
        if task.load is not None:
            samples += _loaded(task_config, task, absent, contents)
        else:
            samples += _generated(config, task_config, task, count_tokens, absent, contents)
    (most,) = Counter(planned.id for planned in samples).most_common(1) or [("", 0)]
    if most[1] > 1:
        raise ValueError(f"tasks: sample {most[0]!r} is asked for twice; ask for it once")
    return Plan(samples=tuple(samples), absent=tuple(absent.items()), contents=contents)


def check(config: Config, engine: Engine, planned: Plan) -> None:
    """Refuses what would fail in every sample.

    Raises:
      ValueError: no sample, lengths or answers beyond the model's context, or a budget that cannot
        be met.
    """
    if not planned.samples:
        reasons = "; ".join(f"{task}: {reason}" for task, reason in planned.absent)
        raise ValueError(f"tasks: no sample at all is there ({reasons})")
    lengths = [sample.length for sample in planned.samples if sample.length is not None]
    # What is read from files has no length before it is tokenised, and one token at least.
    longest, new = max(lengths, default=1), config.max_new_tokens or 1
    if longest + new > engine.context_limit:
        raise ValueError(
            f"length={longest} with max_new_tokens={new}: allowed by the model are "
            f"{engine.context_limit} tokens together"
        )
    for index, budget in enumerate(config.budgets):
        try:
            engine.resolve(budget, min(lengths, default=1))
        except ValueError as error:
            raise ValueError(f"budgets[{index}]={budget!r}: {error}") from error


def name(task: str, subset: str) -> str:
    """The task as tables show it: "needle", "ruler/vt"."""
    return f"{task}/{subset}" if subset else task


def _generated(
    config: Config,
    task_config: TaskConfig,
    task: Task,
    count_tokens: CountTokens,
    absent: dict[str, str],
    contents: dict[str, str],
) -> list[Planned]:
    """Seed by seed, so that a prefix of the run covers all cells."""
    path = None if task_config.path is None else Path(task_config.path)
    rounds: list[list[Planned]] = [[] for _ in range(task_config.samples or 1)]
    for subset in task_config.subsets or task.subsets or ("",):
        full_name = name(task.name, subset)
        own = task.haystacks(subset)
        kinds: tuple[str | None, ...] = (task_config.haystacks or own) if own else (None,)
        for length, kind, depth in itertools.product(
            task_config.lengths, kinds, task_config.depths or (None,)
        ):
            stack = None if kind is None else haystacks.load(kind)
            cell = (stack.kind if stack else "own", str(length))
            place = "/".join((full_name, *cell, *(() if depth is None else (f"d{depth:g}",))))
            text = stack.kind if stack else "own"
            try:
                for index, planned in enumerate(rounds):
                    request = Request(
                        subset=subset,
                        haystack=stack,
                        length=length,
                        depth=depth,
                        seed=config.seed + index,
                        count_tokens=count_tokens,
                        path=path,
                    )
                    make = _maker(task, request, f"{place}/s{request.seed}")
                    if index == 0:
                        first = make()
                        make, text = _made(first), first.haystack
                        _check_scoring(task, [first])
                        contents |= _ingredients(task, full_name, stack, path, subset)
                    planned.append(
                        Planned(
                            id=f"{place}/s{request.seed}",
                            task=full_name,
                            haystack=text,
                            seed=request.seed,
                            length=length,
                            depth=depth,
                            context_key=f"{place}/s{request.seed}",
                            make=make,
                        )
                    )
            except Absent as error:
                absent[full_name] = str(error)
    return [planned for round_ in rounds for planned in round_]


def _loaded(
    task_config: TaskConfig, task: Task, absent: dict[str, str], contents: dict[str, str]
) -> list[Planned]:
    """File by file in its order, at most `samples` contexts of each."""
    assert task.load is not None and task_config.path is not None
    found: list[Planned] = []
    for subset in task_config.subsets or task.subsets or ("",):
        full_name = name(task.name, subset)
        try:
            samples = task.load(Path(task_config.path), subset)
        except Absent as error:
            absent[full_name] = str(error)
            continue
        _check_scoring(task, samples)
        contents[f"samples of {full_name}"] = _hash(samples)
        groups = itertools.groupby(samples, key=lambda sample: sample.context)
        for index, (_, group) in enumerate(itertools.islice(groups, task_config.samples)):
            found += [
                Planned(
                    id=sample.id,
                    task=sample.task,
                    haystack=sample.haystack,
                    seed=sample.seed,
                    length=sample.length,
                    depth=sample.depth,
                    context_key=f"{full_name}/{index}",
                    make=_made(sample),
                )
                for sample in group
            ]
    return found


def _check_sources(task_config: TaskConfig, task: Task) -> None:
    """Refuses subsets read from one file: the same samples under several names."""
    subsets = task_config.subsets or task.subsets
    if task.source is None or task_config.path is None or len(subsets) < 2:
        return
    read_from: dict[Path, str] = {}
    for subset in subsets:
        with contextlib.suppress(Absent):
            file = task.source(Path(task_config.path), subset)
            if file in read_from:
                raise ValueError(
                    f"task {task.name}: path {task_config.path!r} has one file, {file.name}, for "
                    f"{read_from[file]} and {subset}: give one subset of {', '.join(task.subsets)}"
                )
            if file is not None:
                read_from[file] = subset


def _check_scoring(task: Task, samples: Iterable[Sample]) -> None:
    """A metric whose library is missing says so before the run, not in every sample.

    Of every kind of samples one is scored: a file may mix tasks with metrics of their own.
    """
    for sample in {str(s.metadata.get("task")): s for s in samples}.values():
        try:
            task.score(sample, sample.answers[0] if sample.answers else "")
        except ImportError as error:
            what = f"its score needs the package {error.name}; install kvjax[eval]"
            raise ValueError(f"task {task.name}: {what if error.name else error}") from error
        except Exception:  # of this sample alone: the run lists it with its error
            continue


def _ingredients(
    task: Task, full_name: str, stack: haystacks.Haystack | None, path: Path | None, subset: str
) -> dict[str, str]:
    """What generated samples are made of, by content."""
    found = {} if stack is None else {f"haystack {stack.kind}": stack.sha256}
    if path is not None and task.source is not None:
        file = task.source(path, subset)
        if file is not None:
            with file.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            found[f"file of {full_name}"] = digest
    return found


def _hash(samples: Sequence[Sample]) -> str:
    """Of all that is asked, the samples beyond those planned too: more may be added later."""
    digest, context = hashlib.sha256(), None
    for sample in samples:
        if sample.context != context:  # which neighbours share
            context = sample.context
            digest.update(json.dumps(context).encode())
        asked = [sample.id, sample.question, sample.answer_prefix, *sample.answers]
        digest.update(json.dumps(asked).encode())
    return digest.hexdigest()


def _maker(task: Task, request: Request, sample_id: str) -> Callable[[], Sample]:
    def make() -> Sample:
        assert task.make is not None
        return dataclasses.replace(task.make(request), id=sample_id)

    return make


def _made(sample: Sample) -> Callable[[], Sample]:
    return lambda: sample
