"""What a run leaves behind: one record per sample, policy and budget, appended to a file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.config import Config

FORMAT = 1
SAMPLES_FILE = "samples.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One policy's answer to one sample at one budget, with its cost.

    A failed answer has `error` and score 0. Speeds and times are of the batch in which `rows`
    policies decoded side by side; compilation is in none of them.
    """

    policy: str
    budget: str  # as in the config; "full" for the full cache
    budget_tokens: int  # entries per KV head
    answer: str = ""
    score: float = 0.0
    error: str | None = None
    cache_bytes: int = 0  # sum of the sizes of this row's arrays
    alive_bytes: int = 0  # of the entries in them after compression
    kept_tokens: float = 0.0  # entries per KV head after compression, mean over layers and heads
    peak_bytes: int = 0  # most KV bytes alive at once: for an evicting policy the full cache too
    compress_seconds: float = 0.0
    question_seconds: float = 0.0
    decode_seconds: float = 0.0
    tokens_per_second: float | None = None  # decode steps per second
    generated_tokens: int = 0
    rows: int = 0
    needle_kept: float | None = None  # share of the needle's entries that stayed
    kept_profile: tuple[float, ...] = ()  # share kept, over equal stretches of the prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleResult:
    """Everything about one sample; `records` in the order of the run, the full cache first."""

    id: str
    task: str
    haystack: str
    length: int
    depth: float
    seed: int
    prompt_tokens: int
    question_tokens: int
    question: str
    answers: tuple[str, ...]
    excerpt: str  # the context around the needle
    needle_tokens: tuple[int, int] | None  # where the needle lies in the prompt
    metadata: Mapping[str, Any]
    prefill_seconds: float
    records: tuple[Record, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """A complete run."""

    config: Config
    environment: Mapping[str, Any]
    prompt: Mapping[str, Any]  # template text and end tokens
    samples: tuple[SampleResult, ...]

    @property
    def failures(self) -> list[tuple[SampleResult, Record]]:
        return [(s, r) for s in self.samples for r in s.records if r.error is not None]


class Journal:
    """`samples.jsonl`: a header with the config's hash, then one line per finished sample."""

    def __init__(self, directory: str | Path, config: Config):
        self.path = Path(directory) / SAMPLES_FILE
        self.config = config

    def read(self) -> dict[str, SampleResult]:
        """Finished samples by id; a last line cut short by a kill is left out.

        Raises:
          ValueError: the file belongs to another config or is damaged.
        """
        if not self.path.exists():
            return {}
        lines = self.path.read_bytes().split(b"\n")
        # What follows the last line break was cut short.
        complete = lines[:-1]
        if not complete:
            return {}
        found: dict[str, SampleResult] = {}
        for number, line in enumerate(complete, 1):
            try:
                content = json.loads(line)
                if number == 1:
                    given, wanted = content["config_hash"], self.config.hash
                    version = content["format"]
                else:
                    result = _sample_result(content)
                    found[result.id] = result
                    continue
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self.path} line {number} is damaged; give --overwrite or another --output"
                ) from error
            if (given, version) != (wanted, FORMAT):
                raise ValueError(
                    f"{self.path} holds results of another config ({given}, this is {wanted}); "
                    "give --overwrite or another --output"
                )
        return found

    def open(self, finished: Mapping[str, SampleResult], header: Mapping[str, Any]) -> None:
        """Rewrites the file with what is finished, ready for `append`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        first = {"format": FORMAT, "config_hash": self.config.hash, **header}
        lines = [json.dumps(first), *(_line(result) for result in finished.values())]
        write_atomically(self.path, "".join(f"{line}\n" for line in lines))

    def append(self, result: SampleResult) -> None:
        """One write and a sync, so that a killed run loses no finished sample."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(result) + "\n")
            file.flush()
            os.fsync(file.fileno())


def write_atomically(path: Path, text: str) -> None:
    """The file at `path` is the old one or the whole new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _line(result: SampleResult) -> str:
    return json.dumps(dataclasses.asdict(result), ensure_ascii=False, allow_nan=False)


def _sample_result(content: dict[str, Any]) -> SampleResult:
    records = tuple(
        Record(**{**record, "kept_profile": tuple(record["kept_profile"])})
        for record in content["records"]
    )
    answers, needle = tuple(content["answers"]), content["needle_tokens"]
    needle = None if needle is None else tuple(needle)
    return SampleResult(
        **{**content, "records": records, "answers": answers, "needle_tokens": needle}
    )
