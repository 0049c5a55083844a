"""What a run of erasing leaves behind: `samples.jsonl`, a header and one line per sample."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval import environments, identity
from eval.config import PolicyConfig
from eval.durable import append, whole_lines, write_atomically
from eval.erasing.config import ErasingConfig
from eval.erasing.measure import Measured
from eval.identity import Identity
from eval.journal import SAMPLES_FILE

FORMAT = "erasing-2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErasingResult:
    """One sample under every method; under none of them where it failed, with its error."""

    id: str
    cell: str  # "needle-conflict in prose, 1 x 64 of 500 tokens"
    suite: str
    records: tuple[Measured, ...]
    error: str | None = None
    environment: int = 0  # of those in the header


@dataclasses.dataclass(kw_only=True)
class Finished:
    """What a journal holds."""

    results: dict[str, ErasingResult] = dataclasses.field(default_factory=dict)
    header: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def environments(self) -> list[dict[str, Any]]:
        """By their numbers; the first journals of this format have the commit alone."""
        before = {"environment": {"commit": self.header.get("commit")}}
        return environments.of_header({**before, **self.header}) if self.header else []

    @property
    def environment(self) -> dict[str, Any]:
        """All that the samples ran on, side by side."""
        numbers = [result.environment for result in self.results.values()]
        return environments.joined(environments.used(self.environments, numbers), "resumptions")

    @property
    def config(self) -> ErasingConfig:
        """The config that the journal is of."""
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in self.header["config"].items()
        }
        methods = [
            PolicyConfig(name=one["name"], options=tuple(map(tuple, one["options"])))
            for one in given.pop("methods")
        ]
        return ErasingConfig(**given, methods=tuple(methods))


def is_run(directory: Path) -> bool:
    """Whether the directory holds a run of erasing."""
    path = directory / SAMPLES_FILE
    try:
        with path.open("rb") as file:
            return str(json.loads(file.readline())["format"]).startswith("erasing-")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read(path: Path) -> Finished:
    """Finished samples; a last line cut short by a kill is left out.

    Raises:
      ValueError: another format, or a damaged line.
    """
    found = Finished()
    for number, line in enumerate(whole_lines(path) if path.exists() else (), 1):
        try:
            content = json.loads(line)
            if number == 1:
                found.header = dict(content)
                if content["format"] != FORMAT:
                    break  # its lines have other fields
            else:
                records = tuple(Measured(**record) for record in content.pop("records"))
                result = ErasingResult(**content, records=records)
                found.results[result.id] = result
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} line {number} is damaged; give --overwrite or another --output"
            ) from error
    if found.header and found.header["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {found.header['format']}, this version writes {FORMAT}; give "
            "--overwrite or another --output"
        )
    return found


def read_own(path: Path, config: ErasingConfig, now: Identity | None = None) -> Finished:
    """What `config` may go on with.

    Raises:
      ValueError: as in `read`; results of another config or, where `now` is given, of other
        contents under the same names.
    """
    found = read(path)
    if found.header:
        if found.header.get("config_hash") != config.hash:
            raise ValueError(
                f"{path} holds results of another config; give --overwrite or another --output"
            )
        if now is not None:
            identity.check(path, found.header, now)
    return found


def start(
    path: Path, config: ErasingConfig, facts: Mapping[str, Any], results: Iterable[ErasingResult]
) -> None:
    """Rewrites the journal with what is finished, ready for `add`."""
    header = {
        "format": FORMAT,
        "config_hash": config.hash,
        "config": dataclasses.asdict(config),
        **facts,
    }
    lines = [json.dumps(header), *map(_line, results)]
    write_atomically(path, "".join(f"{line}\n" for line in lines))


def add(path: Path, results: Sequence[ErasingResult]) -> None:
    """A killed run loses none of them."""
    append(path, map(_line, results))


def _line(result: ErasingResult) -> str:
    return json.dumps(dataclasses.asdict(result), ensure_ascii=False)
