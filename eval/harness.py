"""The one loop behind every score: a shared prefill per context, policies side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eval import environments, identity, planning, recording
from eval.commit import commit
from eval.config import Config
from eval.journal import Finished, Journal
from eval.planning import Planned
from eval.progress import Clock, Progress, silent
from eval.prompt import Prompter
from eval.recording import Asked, failed
from eval.records import Record, Results, SampleResult
from eval.stages import Compressed, Engine, Prefilled
from eval.tasks import Sample

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
    as wrong, with its error, and is asked again by a run that goes on. The same config gives the
    same answers and scores, in one go or resumed.

    Raises:
      ValueError: before anything is written: a length beyond the model's context, a budget that
        cannot be met, an output directory with results of another config or of other contents
        under the same names, or one that another command is writing.
    """
    prompter = Prompter(engine.tokenizer, config.question)
    journal = Journal(output or config.output, config, shard)
    if not overwrite:
        journal.read()  # what cannot be resumed is refused before minutes of planning
    planned = planning.plan(config, prompter.count)
    planning.check(config, engine, planned)
    index, count = shard
    contexts = planned.contexts()[index::count]
    mine = [sample.id for context in contexts for sample in context]
    prompt = {
        "protocol": config.question,
        "template": {"before_user": prompter.template.head, "after_user": prompter.template.tail},
        "end_tokens": sorted(engine.tokenizer.end_tokens),
        "tokenised": "context with what precedes it, and question with what follows it, apart",
    }
    contents = {**identity.of_prompt(prompt), **engine.identity(), **planned.contents}
    with journal.locked():
        if overwrite:
            journal.clear()
        finished = Finished() if overwrite else journal.read(contents)
        here = environments.number(
            finished.environments, {"commit": commit(), **engine.versions(), **(environment or {})}
        )
        contents = {**finished.identity, **contents}
        header = {
            "prompt": prompt,
            "environments": finished.environments,
            "identity": contents,
            "planned": planned.counts,
            "absent": planned.absent,
        }
        # Samples of a longer run stay in the journal for the next one that wants them.
        journal.open(finished.samples, header)
        done = {name: finished.whole[name] for name in mine if name in finished.whole}
        again = sum(name in finished.samples for name in mine) - len(done)
        meter = Progress(len(mine), len(done), progress, again)
        clock = Clock(engine)
        for group in _batches(config, engine, prompter, contexts, done, batch):
            if isinstance(group, SampleResult):
                results = [group]
            else:
                results = _run_batch(config, engine, group)
            times = clock.lap()
            for result in results:
                timed = dataclasses.replace(result, batch=len(results), environment=here, **times)
                journal.append(timed)
                done[timed.id] = timed
                meter.advance(timed, times["wall_seconds"] / len(results))
        meter.close()
    samples = tuple(done[name] for name in mine)
    ran_on = environments.used(finished.environments, [s.environment for s in samples])
    return Results(
        config=config,
        environment=environments.joined(ran_on, "resumptions"),
        environments=tuple(finished.environments),
        prompt=prompt,
        samples=samples,
        absent=planned.absent,
        identity=contents,
        planned=planned.counts,
    )


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
        left = [one for one in planned if one.id not in done]
        made: list[tuple[Planned, Sample]] = []
        longest, asked = 0, []
        # The samples that are done are made too: the context is cut for the longest question of
        # all, so that a run that goes on cuts it where it was cut before.
        for one in planned if left else ():
            try:
                sample = one.make()
                longest = max(longest, prompter.question_tokens(sample))
                made.append((one, sample))
            except Exception as error:
                if one in left:
                    yield recording.unmade(config, engine, one, error)
        for one, sample in made:
            if one not in left:
                continue
            try:
                asked.append(_ask(config, engine, prompter, sample, longest))
            except Exception as error:
                yield recording.unmade(config, engine, one, error)
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
                found += [failed(label, name, 0, error) for label in labels]
    else:
        for name, budget, labels in groups:
            _run_group(engine, contexts, prefilled, name, budget, labels, records)
    if len(contexts) > 1 and any(r.error for found in records.values() for r in found):
        # What is too much for a batch may be well alone, and no sample pays for another.
        return [result for c in contexts for result in _run_batch(config, engine, [c])]
    return [
        recording.result(asked, prefill_seconds, records[asked.sample.id])
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
            ((label, a.sample.id), failed(label, name, tokens[0], error))
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
                        record = recording.record(
                            one, label, name, tokens[b], text, row, compressed.seconds, answers
                        )
                    except Exception as error:
                        record = failed(label, name, tokens[b], error)
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
