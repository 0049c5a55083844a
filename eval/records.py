"""What a run leaves behind: one record per sample, policy and budget, appended to a file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.config import Config

FORMAT = 2
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
    length: int | None  # tokens asked for
    depth: float | None
    seed: int
    prompt_tokens: int  # prefilled; compressed afterwards
    question_tokens: int
    cut_tokens: int  # left out of the middle of a context too long for the model or the config
    max_new_tokens: int
    question: str
    answers: tuple[str, ...]
    excerpt: str  # the context around the needle
    needle_tokens: tuple[tuple[int, int], ...]  # where the needles lie in the prompt
    metadata: Mapping[str, Any]
    prefill_seconds: float  # of its batch
    model_seconds: float  # of all calls to the model for its batch, compilation left out
    wall_seconds: float  # of its batch, compilation left out
    batch: int  # samples that shared these times
    records: tuple[Record, ...]
    context: str = ""  # the same for samples whose answers stand or fall with one context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """A complete run."""

    config: Config
    environment: Mapping[str, Any]
    prompt: Mapping[str, Any]  # template text and end tokens
    samples: tuple[SampleResult, ...]
    absent: tuple[tuple[str, str], ...] = ()  # tasks without samples, and why

    @property
    def failures(self) -> list[tuple[SampleResult, Record]]:
        return [(s, r) for s in self.samples for r in s.records if r.error is not None]

    @property
    def overhead(self) -> float | None:
        """Share of the run's time, compilation left out, that was not the model's own calls."""
        wall = sum(s.wall_seconds / s.batch for s in self.samples)
        model = sum(s.model_seconds / s.batch for s in self.samples)
        return 1 - model / wall if wall else None


class Journal:
    """`samples.jsonl`: a header that says what runs, then one line per finished sample.

    Processes that share a run write one file each, `samples.0-of-4.jsonl` and so on; whoever
    reads takes them together.
    """

    def __init__(self, directory: str | Path, config: Config, shard: tuple[int, int] = (0, 1)):
        index, count = shard
        name = SAMPLES_FILE if count == 1 else f"samples.{index}-of-{count}.jsonl"
        self.path = Path(directory) / name
        self.config = config

    def read(self) -> dict[str, SampleResult]:
        """Finished samples by id, of all processes; a last line cut short by a kill is left out.

        Raises:
          ValueError: a file belongs to another config or is damaged.
        """
        found: dict[str, SampleResult] = {}
        for path in journals(self.path.parent):
            header, samples = read_journal(path)
            if header is None:
                continue
            given = (header.get("config_hash"), header.get("format"))
            if given != (self.config.hash, FORMAT):
                raise ValueError(
                    f"{path} holds results of another config ({given[0]}, this is "
                    f"{self.config.hash}); give --overwrite or another --output"
                )
            found |= samples
        return found

    def open(self, finished: Mapping[str, SampleResult], header: Mapping[str, Any]) -> None:
        """Rewrites the file with what is finished, ready for `append`."""
        first = {
            "format": FORMAT,
            "config_hash": self.config.hash,
            "config": self.config.mapping,
            **header,
        }
        lines = [json.dumps(first), *(_line(result) for result in finished.values())]
        write_atomically(self.path, "".join(f"{line}\n" for line in lines))

    def append(self, result: SampleResult) -> None:
        """One write and a sync, so that a killed run loses no finished sample."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(result) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def clear(self) -> None:
        """Drops what the directory holds."""
        for path in journals(self.path.parent):
            path.unlink()


def journals(directory: Path) -> list[Path]:
    """The journals of one run."""
    return sorted(directory.glob("samples*.jsonl"))


def read_journal(path: Path) -> tuple[dict[str, Any] | None, dict[str, SampleResult]]:
    """Header and finished samples by id; a last line cut short by a kill is left out.

    A journal that was killed before its first line was whole has no header.

    Raises:
      ValueError: a line in it is damaged.
    """
    header: dict[str, Any] | None = None
    found: dict[str, SampleResult] = {}
    # What follows the last line break was cut short.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            content = json.loads(line)
            if number == 1:
                header = dict(content)
                if header["format"] != FORMAT:
                    break  # its lines have other fields
            else:
                result = _sample_result(content)
                found[result.id] = result
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} line {number} is damaged; give --overwrite or another --output"
            ) from error
    return header, found


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
    answers = tuple(content["answers"])
    needles = tuple((start, end) for start, end in content["needle_tokens"])
    return SampleResult(
        **{**content, "records": records, "answers": answers, "needle_tokens": needles}
    )
