"""Runs an evaluation of erasing, batch by batch; a killed run goes on where it was."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kvjax
from eval import environments, haystacks, identity
from eval.commit import commit
from eval.durable import locked
from eval.erasing import measure, records, suites
from eval.erasing.config import ErasingConfig
from eval.erasing.measure import Measured
from eval.erasing.records import ErasingResult, Finished
from eval.erasing.samples import ErasingSample, prompt_of
from eval.journal import SAMPLES_FILE
from kvjax.erasing import METHODS
from kvjax.learned import modules
from kvjax.learned.eraser import eraser_directory

type _Planned = tuple[str, suites.ErasingRequest, str]


def planned(config: ErasingConfig) -> Iterator[_Planned]:
    """(id, request without its counter, cell) of every sample: all cells grow together."""
    inserted = haystacks.load(config.inserted)
    stacks = [haystacks.load(name) for name in config.haystacks]
    seeds = range(config.seed, config.seed + config.samples)
    sizes = (config.lengths, config.span_tokens, config.spans)
    for seed, suite, stack, length, size, spans in itertools.product(
        seeds, config.suites, stacks, *sizes
    ):
        if spans > 1 and suite not in suites.SEVERAL:
            continue
        request = suites.ErasingRequest(
            suite=suite,
            haystack=stack,
            inserted=inserted,
            length=length,
            span_tokens=size,
            seed=seed,
            count_tokens=len,
            spans=spans,
        )
        cell = f"{suite} in {stack.kind}, {spans} x {size} of {length} tokens"
        yield f"{cell}, seed {seed}", request, cell


def run(
    config: ErasingConfig,
    loaded: Any,
    progress: Callable[[str], None] = lambda line: None,
    overwrite: bool = False,
    batch: int = 8,
) -> list[ErasingResult]:
    """What the config asks for; what the output directory has of it is not run again.

    Up to `batch` samples of a cell are run side by side. A sample that its suite cannot make of a
    seed (a text that says something twice) is made of the next free one. One that fails all the
    same has its error in place of records, and is asked again by a run that goes on.

    Raises:
      ValueError: before anything is written: a method that there is not, a cell that cannot be
        made, answers longer than `max_new_tokens`; in the directory results of another config or
        of other contents under the same names, or another command that writes there.
    """
    configs = measure.labelled(config.methods)
    measure.check(configs)
    path = Path(config.output) / SAMPLES_FILE
    if not overwrite:
        records.read_own(path, config)
    needed = any(METHODS[method.name].needs_eraser for method in configs.values())
    eraser = kvjax.load_eraser(loaded[0], config.eraser) if needed else None
    contents = _contents(config, loaded, needed)
    plan = list(planned(config))
    _check(plan, loaded[1], config.max_new_tokens)
    with locked(path):
        finished = Finished() if overwrite else records.read_own(path, config, contents)
        known = finished.environments
        here = environments.number(known, {"commit": commit(), **environments.versions(loaded[0])})
        facts = {
            "environments": known,
            "identity": {**(finished.header.get("identity") or {}), **contents},
            "planned": len(plan),
        }
        records.start(path, config, facts, finished.results.values())
        done = {name: one for name, one in finished.results.items() if one.error is None}
        left = [one for one in plan if one[0] not in done]
        batch, count = min(batch, config.samples), len(plan) - len(left)

        def measured(samples: Sequence[ErasingSample]) -> list[list[Measured]]:
            return measure.measure(loaded, eraser, configs, samples, config.max_new_tokens)

        for several in _batches(left, batch):
            results = [
                dataclasses.replace(result, environment=here)
                for result in _results(several, loaded[1], batch, measured)
            ]
            records.add(path, results)
            done |= {result.id: result for result in results}
            count += len(several)
            failed = sum(result.error is not None for result in results)
            note = f" | {failed} FAILED" if failed else ""
            progress(f"[{count}/{len(plan)}] {several[-1][0]}{note}")
    return [done[name] for name, _, _ in plan]


def _results(
    several: Sequence[_Planned],
    tokenizer: Any,
    batch: int,
    measured: Callable[[Sequence[ErasingSample]], list[list[Measured]]],
) -> list[ErasingResult]:
    """Of every sample its records, or its error: none pays for another that fails."""
    samples: dict[str, ErasingSample] = {}
    outcomes: dict[str, list[Measured] | Exception] = {}
    for name, request, _ in several:
        try:
            samples[name] = made(request, tokenizer)
        except Exception as error:
            outcomes[name] = error
    rows = list(samples.values())
    try:
        # Always as many rows, so that a cell's last batch needs no other program.
        together = measured(rows + rows[:1] * (batch - len(rows))) if rows else []
        outcomes |= zip(samples, together, strict=False)
    except Exception:
        for name, sample in samples.items():
            try:
                (outcomes[name],) = measured([sample])
            except Exception as error:
                outcomes[name] = error
    return [_result(one, outcomes[one[0]]) for one in several]


def _result(planned: _Planned, outcome: list[Measured] | Exception) -> ErasingResult:
    name, request, cell = planned
    if isinstance(outcome, Exception):
        found: tuple[Measured, ...] = ()
        error = " ".join(f"{type(outcome).__name__}: {outcome}".split())[:500]
    else:
        found, error = tuple(outcome), None
    return ErasingResult(id=name, cell=cell, suite=request.suite, records=found, error=error)


def _contents(config: ErasingConfig, loaded: Any, needs_eraser: bool) -> dict[str, str]:
    """What the names in the config stand for."""
    stacks = map(haystacks.load, (*config.haystacks, config.inserted))
    found = identity.of_model(*loaded) | {f"haystack {s.kind}": s.sha256 for s in stacks}
    if needs_eraser:
        found["eraser"] = modules.digest(eraser_directory(loaded[0], config.eraser))
    return found


def _check(plan: Sequence[_Planned], tokenizer: Any, max_new_tokens: int) -> None:
    """Refuses cells of which no sample can be made, and answers that are too long for a reply."""
    cells: dict[str, list[suites.ErasingRequest]] = {}
    for _, request, cell in plan:
        cells.setdefault(cell, []).append(request)
    for requests in cells.values():
        sample = _first(requests[:_TRIED], tokenizer)
        measure.check_answer(prompt_of(sample, tokenizer), max_new_tokens)


def _first(requests: Sequence[suites.ErasingRequest], tokenizer: Any) -> ErasingSample:
    """The first sample that can be made; the last one's error where none can."""
    *others, last = requests
    for request in others:
        with contextlib.suppress(ValueError):
            return made(request, tokenizer)
    return made(last, tokenizer)


def _batches(plan: Sequence[_Planned], size: int) -> Iterator[list[_Planned]]:
    """Samples of one cell together; a batch is run when it is full, the rest at the end."""
    waiting: dict[str, list[_Planned]] = {}
    for one in plan:
        several = waiting.setdefault(one[2], [])
        several.append(one)
        if len(several) == size:
            yield waiting.pop(one[2])
    yield from waiting.values()


_STRIDE = 10**6  # seeds apart that stand in for one another
_ATTEMPTS = 16
_TRIED = 4  # samples of a cell before all of it is refused


def made(request: suites.ErasingRequest, tokenizer: Any) -> ErasingSample:
    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    for attempt in range(_ATTEMPTS):
        seed = request.seed + attempt * _STRIDE
        try:
            return suites.make(dataclasses.replace(request, seed=seed, count_tokens=count))
        except ValueError:
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError
