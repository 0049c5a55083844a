"""Runs an evaluation of erasing, batch by batch; a killed run goes on where it was."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kvjax
from eval import haystacks
from eval.commit import commit
from eval.durable import write_atomically
from eval.erasing import measure, suites
from eval.erasing.config import ErasingConfig
from eval.erasing.measure import Measured
from eval.erasing.samples import ErasingSample
from eval.journal import SAMPLES_FILE
from kvjax.erasing import METHODS

FORMAT = "erasing-2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErasingResult:
    """One sample under every method."""

    id: str
    cell: str  # "needle-conflict in prose, 1 x 64 of 500 tokens"
    suite: str
    records: tuple[Measured, ...]


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
    seed (a text that says something twice) is made of the next free one.

    Raises:
      ValueError: a method that there is not, or results of another config in the directory.
    """
    configs = measure.labelled(config.methods)
    measure.check(configs)
    needed = any(METHODS[method.name].needs_eraser for method in configs.values())
    eraser = kvjax.load_eraser(loaded[0], config.eraser) if needed else None
    path = Path(config.output) / SAMPLES_FILE
    done = {} if overwrite else _read(path, config)
    header = {
        "format": FORMAT,
        "config_hash": config.hash,
        "config": dataclasses.asdict(config),
        "commit": commit(),
    }
    lines = [json.dumps(header), *(_line(result) for result in done.values())]
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    plan = list(planned(config))
    left = [one for one in plan if one[0] not in done]
    batch, count = min(batch, config.samples), len(plan) - len(left)
    for several in _batches(left, batch):
        samples = [made(request, loaded[1]) for _, request, _ in several]
        # Always as many rows, so that a cell's last batch needs no other program.
        rows = samples + [samples[0]] * (batch - len(samples))
        found = measure.measure(loaded, eraser, configs, rows, config.max_new_tokens)
        for (name, request, cell), records in zip(several, found, strict=False):
            done[name] = ErasingResult(
                id=name, cell=cell, suite=request.suite, records=tuple(records)
            )
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{_line(done[name])}\n" for name, _, _ in several))
            file.flush()
            os.fsync(file.fileno())
        count += len(several)
        progress(f"[{count}/{len(plan)}] {several[-1][0]}")
    return [done[name] for name, _, _ in plan]


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


def _read(path: Path, config: ErasingConfig) -> dict[str, ErasingResult]:
    """Finished samples; a last line cut short by a kill is left out."""
    if not path.exists():
        return {}
    found: dict[str, ErasingResult] = {}
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
            if number > 1:
                records = tuple(Measured(**record) for record in content.pop("records"))
                result = ErasingResult(**content, records=records)
                found[result.id] = result
                continue
            given = (content["format"], content["config_hash"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} line {number} is damaged; give --overwrite or another --output"
            ) from error
        if given != (FORMAT, config.hash):
            raise ValueError(
                f"{path} holds results of another config; give --overwrite or another --output"
            )
    return found


def _line(result: ErasingResult) -> str:
    return json.dumps(dataclasses.asdict(result), ensure_ascii=False)
