"""`samples.jsonl`: a header that says what runs, then one line per finished sample."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eval import environments, identity
from eval.config import Config
from eval.durable import append, locked, whole_lines, write_atomically
from eval.identity import Identity
from eval.records import Record, SampleResult

FORMAT = 2
SAMPLES_FILE = "samples.jsonl"


@dataclasses.dataclass(kw_only=True)
class Finished:
    """What the journals of a directory hold. A sample's environment is one of `environments`."""

    samples: dict[str, SampleResult] = dataclasses.field(default_factory=dict)
    environments: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    identity: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def whole(self) -> dict[str, SampleResult]:
        """The samples that need not be asked again: every policy has answered them."""
        return {name: sample for name, sample in self.samples.items() if not sample.failed}


class Journal:
    """The journal of one process.

    Processes that share a run write one file each, `samples.0-of-4.jsonl` and so on; whoever
    reads takes them together.
    """

    def __init__(self, directory: str | Path, config: Config, shard: tuple[int, int] = (0, 1)):
        index, count = shard
        name = SAMPLES_FILE if count == 1 else f"samples.{index}-of-{count}.jsonl"
        self.path = Path(directory) / name
        self.config = config

    def read(self, now: Identity | None = None) -> Finished:
        """Finished samples of all processes; a last line cut short by a kill is left out.

        Raises:
          ValueError: a file is damaged, or belongs to another config, format or, where `now` is
            given, to other contents.
        """
        found = Finished()
        for path in journals(self.path.parent):
            header, samples = read_journal(path)
            if header is None:
                continue
            if header.get("format") != FORMAT:
                raise ValueError(
                    f"{path} has format {header.get('format')}, this version writes {FORMAT}; "
                    "give --overwrite or another --output"
                )
            if header.get("config_hash") != self.config.hash:
                raise ValueError(
                    f"{path} holds results of another config ({header.get('config_hash')}, this "
                    f"is {self.config.hash}); give --overwrite or another --output"
                )
            if now is not None:
                identity.check(path, header, now, samples.values())
            found.identity |= header.get("identity") or {}
            found.samples = joined(
                found.samples.values(), numbered(header, samples.values(), found.environments)
            )
        return found

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Keeps other commands from writing this journal; errors as in `durable.locked`."""
        return locked(self.path)

    def open(self, finished: Mapping[str, SampleResult], header: Mapping[str, Any]) -> None:
        """Rewrites the file with what is finished, ready for `append`."""
        first = {
            "format": FORMAT,
            "config_hash": self.config.hash,
            "config": self.config.mapping,
            **header,
        }
        lines = [json.dumps(first), *map(_line, finished.values())]
        write_atomically(self.path, "".join(f"{line}\n" for line in lines))

    def append(self, result: SampleResult) -> None:
        """A killed run loses no finished sample."""
        append(self.path, [_line(result)])

    def clear(self) -> None:
        """Drops what the directory holds, unless another process is writing it."""
        with contextlib.ExitStack() as held:
            found = journals(self.path.parent)
            for path in found:
                if path != self.path:
                    held.enter_context(locked(path))
            for path in found:
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
    for number, line in enumerate(whole_lines(path), 1):
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


def numbered(
    header: Mapping[str, Any], samples: Iterable[SampleResult], known: list[dict[str, Any]]
) -> list[SampleResult]:
    """Samples of one journal, their environments numbered in `known`, which grows by new ones."""
    places = [environments.number(known, one) for one in environments.of_header(header)]
    return [dataclasses.replace(s, environment=places[s.environment]) for s in samples]


def joined(*several: Iterable[SampleResult]) -> dict[str, SampleResult]:
    """By id; of two with one id, which a resumed shard repeats, the later one that did not fail."""
    found: dict[str, SampleResult] = {}
    for samples in several:
        for sample in samples:
            if sample.id not in found or found[sample.id].failed or not sample.failed:
                found[sample.id] = sample
    return found


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
