"""What the engine measured of a sample, as the records that a run leaves behind."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.config import Config
from eval.planning import Planned
from eval.prompt import Prompt
from eval.records import Record, SampleResult
from eval.stages import Answers, Engine, Row
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


def record(
    asked: Asked,
    label: str,
    budget: str,
    tokens: int,
    text: str,
    row: Row,
    compress_seconds: float,
    answers: Answers,
) -> Record:
    """The scored answer.

    Raises:
      ValueError: the metric gave no number; whatever else a metric raises.
    """
    score = TASKS[asked.sample.task.split("/")[0]].score(asked.sample, text)
    if not math.isfinite(score):
        raise ValueError(f"score={score}: allowed are numbers in [0, 1]")
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


def result(asked: Asked, prefill_seconds: float, records: list[Record]) -> SampleResult:
    """The sample with its records; its batch, times and environment are for who ran it to add."""
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
    short = {key: value for key, value in metadata.items() if len(str(value)) <= _METADATA}
    return {key: value if _is_json(value) else str(value) for key, value in short.items()}


def _is_json(value: Any) -> bool:
    """Not a date of a parquet file, nor a NaN, which a journal could not hold."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def unmade(config: Config, engine: Engine, planned: Planned, error: Exception) -> SampleResult:
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
    return result(asked, 0.0, [failed(policy, budget, 0, error) for policy, budget in labels])


def failed(label: str, budget: str, tokens: int, error: Exception) -> Record:
    """An answer that there is not, which counts as wrong."""
    message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return Record(policy=label, budget=budget, budget_tokens=tokens, error=message)


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
