"""The one loop behind every score: a shared prefill per sample, policies side by side."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval import haystacks
from eval.config import Config
from eval.progress import Progress, silent
from eval.prompt import Prompt, Prompter
from eval.records import Journal, Record, Results, SampleResult
from eval.stages import Engine, Prefilled, Row
from eval.tasks import TASKS, Sample

_PROFILE_BINS = 40
_EXCERPT = 160


def samples(config: Config, prompter: Prompter) -> list[Sample]:
    """Every sample of the config, in the order of the run: a prefix of it covers all cells.

    Raises:
      ValueError: a haystack file that cannot be read, a length too short for its task.
    """
    found = []
    for task_config in config.tasks:
        task = TASKS[task_config.name]
        stacks = [haystacks.load(name) for name in task_config.haystacks]
        for index in range(task_config.samples):
            found += [
                task.make(stack, length, depth, config.seed + index, prompter.count)
                for length in task_config.lengths
                for stack in stacks
                for depth in task_config.depths
            ]
    return found


def run(
    config: Config,
    engine: Engine,
    progress: Callable[[str], None] = silent,
    output: str | Path | None = None,
    overwrite: bool = False,
    environment: dict[str, Any] | None = None,
) -> Results:
    """Runs what `config` asks for and is not yet in the output directory's journal.

    A sample that fails stays
    in the results as wrong, with its error. The same config gives the same answers and scores,
    in one go or resumed.

    Raises:
      ValueError: before anything is written: a length beyond the model's context, a budget that
        cannot be met, an output directory with results of another config.
    """
    prompter = Prompter(engine.tokenizer, config.question)
    journal = Journal(output or config.output, config)
    finished = {} if overwrite else journal.read()
    planned = samples(config, prompter)
    _check_lengths(config, engine, planned)
    prompt = {
        "protocol": config.question,
        "template": {"before_user": prompter.template.head, "after_user": prompter.template.tail},
        "end_tokens": sorted(engine.tokenizer.end_tokens),
        "tokenised": "context with what precedes it, and question with what follows it, apart",
    }
    wanted = {sample.id for sample in planned}
    done = {name: result for name, result in finished.items() if name in wanted}
    # Samples of a longer run stay in the journal for the next one that wants them.
    journal.open(finished, {"prompt": prompt})
    meter = Progress(len(planned), len(done), progress)
    for sample in planned:
        if sample.id in done:
            continue
        start = time.perf_counter()
        result = run_sample(config, engine, prompter, sample)
        journal.append(result)
        done[result.id] = result
        meter.advance(result, time.perf_counter() - start)
    meter.close()
    return Results(
        config=config,
        environment={**_environment(engine), **(environment or {})},
        prompt=prompt,
        samples=tuple(done[sample.id] for sample in planned),
    )


def run_sample(config: Config, engine: Engine, prompter: Prompter, sample: Sample) -> SampleResult:
    """One prefill, then the full cache alone, then each budget with all policies in one batch."""
    prompt = prompter.prompt(sample)
    groups: list[tuple[str, int | float | str | None, list[str]]] = [("full", None, ["full"])]
    evicting = [label for label in engine.policies if label != "full"]
    groups += [(str(budget), budget, evicting) for budget in config.budgets if evicting]
    records: list[Record] = []
    prefill_seconds = 0.0
    try:
        prefilled = engine.prefill(prompt.prefill)
        prefill_seconds = prefilled.seconds
    except Exception as error:  # a sample is never dropped, whatever went wrong in it
        for name, _, labels in groups:
            records += [_failed(label, name, 0, error) for label in labels]
    else:
        for name, budget, labels in groups:
            records += _run_group(config, engine, sample, prompt, prefilled, name, budget, labels)
    return SampleResult(
        id=sample.id,
        task=sample.task,
        haystack=sample.haystack,
        length=sample.length,
        depth=sample.depth,
        seed=sample.seed,
        prompt_tokens=len(prompt.prefill),
        question_tokens=len(prompt.question),
        question=sample.question,
        answers=sample.answers,
        excerpt=_excerpt(sample),
        needle_tokens=prompt.needle,
        metadata=sample.metadata,
        prefill_seconds=prefill_seconds,
        records=tuple(records),
    )


def _run_group(
    config: Config,
    engine: Engine,
    sample: Sample,
    prompt: Prompt,
    prefilled: Prefilled,
    name: str,
    budget: int | float | str | None,
    labels: Sequence[str],
) -> list[Record]:
    room = engine.question_bucket(len(prompt.question)) + config.max_new_tokens
    tokens = 0
    records: dict[str, Record] = {}
    by_layout: dict[Any, dict[str, Row]] = {}
    for label in labels:
        try:
            tokens, largest = prefilled.length, prefilled.bucket
            if budget is not None:
                tokens, largest = (engine.resolve(budget, n) for n in (tokens, largest))
            # The layout follows from the bucket, so that its samples share one compilation.
            layout = engine.layout(label, largest, prefilled.bucket, room)
            row = engine.compress(prefilled, label, tokens, layout)
            by_layout.setdefault(layout, {})[label] = row
        except Exception as error:
            records[label] = _failed(label, name, tokens, error)
    # A policy that needs more slots than others must not lend its bytes to them.
    for rows in by_layout.values():
        try:
            records |= _answered(config, engine, sample, prompt, prefilled, name, tokens, rows)
        except Exception as error:
            records |= {label: _failed(label, name, tokens, error) for label in rows}
    return [records[label] for label in labels]


def _answered(
    config: Config,
    engine: Engine,
    sample: Sample,
    prompt: Prompt,
    prefilled: Prefilled,
    name: str,
    tokens: int,
    rows: dict[str, Row],
) -> dict[str, Record]:
    """The records of rows that decode side by side."""
    answers = engine.answer(prefilled, list(rows.values()), prompt.question, config.max_new_tokens)
    records = {}
    for (label, row), ids in zip(rows.items(), answers.tokens, strict=True):
        text = engine.tokenizer.decode(ids)
        speed = answers.steps / answers.decode_seconds if answers.decode_seconds else None
        # A full cache is not cut down from anything: the copy beside the prefill's is ours.
        beside = 0 if label == "full" else prefilled.nbytes
        records[label] = Record(
            policy=label,
            budget=name,
            budget_tokens=tokens,
            answer=text,
            score=TASKS[sample.task].score(sample.answers, text),
            cache_bytes=row.nbytes,
            alive_bytes=row.alive_nbytes,
            kept_tokens=row.alive,
            peak_bytes=row.nbytes + beside,
            compress_seconds=row.seconds,
            question_seconds=answers.question_seconds,
            decode_seconds=answers.decode_seconds,
            tokens_per_second=speed,
            generated_tokens=len(ids),
            rows=len(rows),
            needle_kept=_needle_kept(row.kept, prompt.needle),
            kept_profile=_profile(row.kept),
        )
    return records


def _failed(label: str, budget: str, tokens: int, error: Exception) -> Record:
    message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return Record(policy=label, budget=budget, budget_tokens=tokens, error=message)


def _check_lengths(config: Config, engine: Engine, planned: Sequence[Sample]) -> None:
    longest = max(sample.length for sample in planned)
    if longest + config.max_new_tokens > engine.context_limit:
        raise ValueError(
            f"length={longest} with max_new_tokens={config.max_new_tokens}: allowed by the model "
            f"are {engine.context_limit} tokens together"
        )
    shortest = min(sample.length for sample in planned)
    for index, budget in enumerate(config.budgets):
        try:
            engine.resolve(budget, shortest)
        except ValueError as error:
            raise ValueError(f"budgets[{index}]={budget!r}: {error}") from error


def _needle_kept(kept: np.ndarray, span: tuple[int, int] | None) -> float | None:
    if span is None or span[1] <= span[0]:
        return None
    return round(float(kept[span[0] : span[1]].mean()), 4)


def _profile(kept: np.ndarray) -> tuple[float, ...]:
    bins = min(_PROFILE_BINS, len(kept))
    return tuple(round(float(part.mean()), 3) for part in np.array_split(kept, bins))


def _excerpt(sample: Sample) -> str:
    start, end = sample.metadata.get("needle_span", (0, 0))
    left, right = max(0, start - _EXCERPT), min(len(sample.context), end + _EXCERPT)
    before, after = "…" if left else "", "…" if right < len(sample.context) else ""
    return before + sample.context[left:right] + after


def _environment(engine: Engine) -> dict[str, Any]:
    return {"commit": _commit(), **engine.versions()}


def _commit() -> str | None:
    """The commit of the code that ran, with "-dirty" where it was changed; None outside git."""
    where = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(where), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):
            return None
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
