"""The one loop behind every score: a shared prefill per context, policies side by side."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.commit import commit
from eval.config import Config
from eval.planning import Plan, Planned, plan
from eval.progress import Progress, silent
from eval.prompt import Prompt, Prompter
from eval.records import Journal, Record, Results, SampleResult
from eval.stages import Answers, Compressed, Engine, Prefilled, Row
from eval.tasks import TASKS, Sample

_PROFILE_BINS = 40
_EXCERPT = 160
_METADATA = 2000  # characters of one entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A sample and its tokens."""

    sample: Sample
    prompt: Prompt
    max_new_tokens: int


type Context = list[Asked]
"""Questions that follow one prefilled context."""


def run(
    config: Config,
    engine: Engine,
    progress: Callable[[str], None] = silent,
    output: str | Path | None = None,
    overwrite: bool = False,
    environment: dict[str, Any] | None = None,
    batch: int = 1,
    shard: tuple[int, int] = (0, 1),
) -> Results:
    """Runs what `config` asks for and is not yet in the output directory's journal.

    Up to `batch` contexts of one bucket are prefilled and decoded together. Of several processes
    the one with `shard` (i, n) takes every n-th context. A sample that fails stays in the results
    as wrong, with its error. The same config gives the same answers and scores, in one go or
    resumed.

    Raises:
      ValueError: before anything is written: a length beyond the model's context, a budget that
        cannot be met, an output directory with results of another config.
    """
    prompter = Prompter(engine.tokenizer, config.question)
    journal = Journal(output or config.output, config, shard)
    finished = {} if overwrite else journal.read()
    planned = plan(config, prompter.count)
    _check(config, engine, planned)
    index, count = shard
    contexts = planned.contexts()[index::count]
    mine = [sample.id for context in contexts for sample in context]
    prompt = {
        "protocol": config.question,
        "template": {"before_user": prompter.template.head, "after_user": prompter.template.tail},
        "end_tokens": sorted(engine.tokenizer.end_tokens),
        "tokenised": "context with what precedes it, and question with what follows it, apart",
    }
    header = {
        "prompt": prompt,
        "environment": {"commit": commit(), **engine.versions(), **(environment or {})},
        "absent": planned.absent,
    }
    done = {name: finished[name] for name in mine if name in finished}
    if overwrite:
        journal.clear()
    # Samples of a longer run stay in the journal for the next one that wants them.
    journal.open(finished, header)
    meter = Progress(len(mine), len(done), progress)
    clock = _Clock(engine)
    for group in _batches(config, engine, prompter, contexts, done, batch):
        results = [group] if isinstance(group, SampleResult) else _run_batch(config, engine, group)
        times = clock.lap()
        for result in results:
            timed = dataclasses.replace(result, **times, batch=len(results))
            journal.append(timed)
            done[timed.id] = timed
            meter.advance(timed, times["wall_seconds"] / len(results))
    meter.close()
    return Results(
        config=config,
        environment=header["environment"],
        prompt=prompt,
        samples=tuple(done[name] for name in mine),
        absent=planned.absent,
    )


class _Clock:
    """Seconds since the last lap, all of them and the model's, without compilation."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.last = self._now()

    def _now(self) -> tuple[float, float]:
        compiling = self.engine.compile_seconds
        return time.perf_counter() - compiling, self.engine.model_seconds

    def lap(self) -> dict[str, float]:
        before, self.last = self.last, self._now()
        wall, model = (now - then for now, then in zip(self.last, before, strict=True))
        return {"wall_seconds": round(wall, 4), "model_seconds": round(model, 4)}


def _batches(
    config: Config,
    engine: Engine,
    prompter: Prompter,
    contexts: Sequence[Sequence[Planned]],
    done: dict[str, SampleResult],
    size: int,
) -> Iterator[list[Context] | SampleResult]:
    """Contexts of equal shapes together; a sample that cannot be made is its own failed result."""
    waiting: dict[Any, list[Context]] = {}
    for planned in contexts:
        samples: list[Sample] = []
        asked: Context = []
        for one in planned:
            if one.id in done:
                continue
            try:
                samples.append(one.make())
            except Exception as error:
                yield _unmade(config, engine, one, error)
        longest = max((prompter.question_tokens(sample) for sample in samples), default=0)
        for sample in samples:
            try:
                asked.append(_ask(config, engine, prompter, sample, longest))
            except Exception as error:
                (one,) = (one for one in planned if one.id == sample.id)
                yield _unmade(config, engine, one, error)
        for context in _sharing(asked):
            first = context[0]
            if size == 1 or len(context) > 1:
                yield [context]
                continue
            room = engine.room(len(first.prompt.question), first.max_new_tokens)
            key = (engine.bucket(len(first.prompt.prefill)), room, first.max_new_tokens)
            waiting.setdefault(key, []).append(context)
            if len(waiting[key]) == size:
                yield waiting.pop(key)
    yield from waiting.values()


def _ask(
    config: Config, engine: Engine, prompter: Prompter, sample: Sample, longest_question: int
) -> Asked:
    """The sample's tokens; contexts that are shared are cut alike, for their longest question."""
    max_new_tokens = config.max_new_tokens or sample.max_new_tokens
    limit = engine.context_limit - max_new_tokens
    if (most := config.max_length(sample.task)) is not None:
        limit = min(limit, most)
    prompt = prompter.prompt(sample, limit - longest_question)
    return Asked(sample=sample, prompt=prompt, max_new_tokens=max_new_tokens)


def _sharing(asked: Context) -> list[Context]:
    """The questions that follow the very same tokens, together; all alone when it is seen."""
    if asked and all(one.prompt.prefill == asked[0].prompt.prefill for one in asked):
        return [asked]
    return [[one] for one in asked]


def _run_batch(config: Config, engine: Engine, contexts: list[Context]) -> list[SampleResult]:
    """One prefill, then the full cache alone, then each budget with all policies in one batch."""
    groups: list[tuple[str, int | float | str | None, list[str]]] = [("full", None, ["full"])]
    evicting = [label for label in engine.policies if label != "full"]
    groups += [(str(budget), budget, evicting) for budget in config.budgets if evicting]
    records: dict[str, list[Record]] = {a.sample.id: [] for c in contexts for a in c}
    prefill_seconds = 0.0
    try:
        prefilled = engine.prefill([context[0].prompt.prefill for context in contexts])
        prefill_seconds = prefilled.seconds
    except Exception as error:  # a sample is never dropped, whatever went wrong in it
        for name, _, labels in groups:
            for found in records.values():
                found += [_failed(label, name, 0, error) for label in labels]
    else:
        for name, budget, labels in groups:
            _run_group(engine, contexts, prefilled, name, budget, labels, records)
    if len(contexts) > 1 and any(r.error for found in records.values() for r in found):
        # What is too much for a batch may be well alone, and no sample pays for another.
        return [result for c in contexts for result in _run_batch(config, engine, [c])]
    return [
        _result(asked, prefill_seconds, records[asked.sample.id])
        for context in contexts
        for asked in context
    ]


def _run_group(
    engine: Engine,
    contexts: list[Context],
    prefilled: Prefilled,
    name: str,
    budget: int | float | str | None,
    labels: Sequence[str],
    records: dict[str, list[Record]],
) -> None:
    """Adds a record of every policy at one budget to every sample of the batch."""
    asked = [one for context in contexts for one in context]
    room = max(engine.room(len(a.prompt.question), a.max_new_tokens) for a in asked)
    tokens = [0] * len(contexts)
    by_layout: dict[Any, dict[str, Compressed]] = {}
    found: dict[tuple[str, str], Record] = {}

    def fail(names: Sequence[str], error: Exception, which: Sequence[Asked] = asked) -> None:
        found.update(
            ((label, a.sample.id), _failed(label, name, tokens[0], error))
            for label in names
            for a in which
        )

    for label in labels:
        try:
            tokens, largest = list(prefilled.lengths), prefilled.bucket
            if budget is not None:
                tokens = [engine.resolve(budget, length) for length in prefilled.lengths]
                largest = engine.resolve(budget, prefilled.bucket)
            # The layout follows from the bucket, so that its samples share one compilation.
            layout = engine.layout(label, largest, prefilled.bucket, room)
            compressed = engine.compress(prefilled, label, tokens, layout)
            by_layout.setdefault(layout, {})[label] = compressed
        except Exception as error:
            fail([label], error)
    # A policy that needs more slots than others must not lend its bytes to them.
    for side_by_side in by_layout.values():
        for number in range(len(contexts[0])):
            asking = [context[number] for context in contexts]
            try:
                answers = engine.answer(
                    prefilled,
                    list(side_by_side.values()),
                    [one.prompt.question for one in asking],
                    max(one.max_new_tokens for one in asking),
                )
            except Exception as error:
                fail(list(side_by_side), error, asking)
                continue
            for (label, compressed), texts in zip(
                side_by_side.items(), answers.tokens, strict=True
            ):
                for b, (one, ids) in enumerate(zip(asking, texts, strict=True)):
                    row = compressed.rows[b]
                    text = engine.tokenizer.decode(ids)
                    try:
                        record = _record(
                            one, label, name, tokens[b], text, row, compressed.seconds, answers
                        )
                    except Exception as error:
                        record = _failed(label, name, tokens[b], error)
                    # A full cache is not cut from anything: the copy beside the prefill's is ours.
                    beside = 0 if label == "full" else prefilled.nbytes
                    found[label, one.sample.id] = dataclasses.replace(
                        record,
                        peak_bytes=row.nbytes + beside,
                        generated_tokens=len(ids),
                        rows=len(side_by_side) * len(asking),
                    )
    for one in asked:
        records[one.sample.id] += [found[label, one.sample.id] for label in labels]


def _record(
    asked: Asked,
    label: str,
    budget: str,
    tokens: int,
    text: str,
    row: Row,
    compress_seconds: float,
    answers: Answers,
) -> Record:
    score = TASKS[asked.sample.task.split("/")[0]].score(asked.sample, text)
    speed = answers.steps / answers.decode_seconds if answers.decode_seconds else None
    return Record(
        policy=label,
        budget=budget,
        budget_tokens=tokens,
        answer=text,
        score=score,
        cache_bytes=row.nbytes,
        alive_bytes=row.alive_nbytes,
        kept_tokens=row.alive,
        compress_seconds=compress_seconds,
        question_seconds=answers.question_seconds,
        decode_seconds=answers.decode_seconds,
        tokens_per_second=speed,
        needle_kept=_needle_kept(row.kept, asked.prompt.needles),
        kept_profile=_profile(row.kept),
    )


def _result(asked: Asked, prefill_seconds: float, records: list[Record]) -> SampleResult:
    sample, prompt = asked.sample, asked.prompt
    return SampleResult(
        id=sample.id,
        task=sample.task,
        haystack=sample.haystack,
        length=sample.length,
        depth=sample.depth,
        seed=sample.seed,
        prompt_tokens=len(prompt.prefill),
        question_tokens=len(prompt.question),
        cut_tokens=prompt.cut,
        max_new_tokens=asked.max_new_tokens,
        question=sample.question,
        answers=sample.answers,
        excerpt=_excerpt(sample),
        needle_tokens=prompt.needles,
        metadata=_brief(sample.metadata),
        prefill_seconds=prefill_seconds,
        model_seconds=0.0,
        wall_seconds=0.0,
        batch=1,
        records=tuple(records),
        context=_context(sample),
    )


def _context(sample: Sample) -> str:
    """A name for what the task says that its samples share, else for their very text."""
    text = sample.metadata.get("shared") or sample.context
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16] if text else ""


def _brief(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What is short enough to stand in every record; whole files belong to the data."""
    return {key: value for key, value in metadata.items() if len(str(value)) <= _METADATA}


def _unmade(config: Config, engine: Engine, planned: Planned, error: Exception) -> SampleResult:
    """The result of a sample whose context or prompt could not be made."""
    evicting = [label for label in engine.policies if label != "full"]
    labels = [("full", "full")] + [(p, str(b)) for b in config.budgets for p in evicting]
    sample = Sample(
        id=planned.id,
        task=planned.task,
        haystack=planned.haystack,
        seed=planned.seed,
        depth=planned.depth,
        length=planned.length,
        context="",
        question="",
        answer_prefix="",
        answers=(),
        max_new_tokens=0,
    )
    asked = Asked(sample=sample, prompt=Prompt(prefill=[], question=[]), max_new_tokens=0)
    return _result(asked, 0.0, [_failed(policy, budget, 0, error) for policy, budget in labels])


def _failed(label: str, budget: str, tokens: int, error: Exception) -> Record:
    message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return Record(policy=label, budget=budget, budget_tokens=tokens, error=message)


def _check(config: Config, engine: Engine, planned: Plan) -> None:
    """Refuses what would fail in every sample."""
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


def _needle_kept(kept: np.ndarray, spans: Sequence[tuple[int, int]]) -> float | None:
    parts = [kept[start:end] for start, end in spans if end > start]
    return round(float(np.concatenate(parts).mean()), 4) if parts else None


def _profile(kept: np.ndarray) -> tuple[float, ...]:
    bins = min(_PROFILE_BINS, len(kept))
    return tuple(round(float(part.mean()), 3) for part in np.array_split(kept, bins))


def _excerpt(sample: Sample) -> str:
    start, end = sample.metadata.get("needle_span") or (0, 0)
    left, right = max(0, start - _EXCERPT), min(len(sample.context), end + _EXCERPT)
    before, after = "…" if left else "", "…" if right < len(sample.context) else ""
    return before + sample.context[left:right] + after
