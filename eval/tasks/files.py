"""Rows of a data set's file: JSONL, a JSON array or parquet, each field checked as it is read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.tasks import hub
from eval.tasks.base import Absent

_ENDINGS = (".jsonl", ".json", ".parquet")


@dataclasses.dataclass(frozen=True)
class Row:
    """One sample's fields. Its methods raise ValueError naming file, place, field and value."""

    place: str  # "qasper.jsonl line 3", for messages
    number: int  # place in the data set, from 1
    values: Mapping[str, Any]
    within: str = ""  # path to this row inside the file's row: "multi_turns[2]."

    def text(self, field: str, default: str | None = None) -> str:
        if default is not None and self.values.get(field) is None:
            return default
        return self._checked(field, str, "text")

    def texts(self, field: str) -> tuple[str, ...]:
        return tuple(self._list(field, str, "a list of texts"))

    def integer(self, field: str) -> int:
        return self._checked(field, int, "a whole number")

    def integers(self, field: str) -> tuple[int, ...]:
        return tuple(self._list(field, int, "a list of whole numbers"))

    def answers(self, field: str) -> tuple[str, ...]:
        """Texts or numbers as texts, one or a list of at least one."""
        value = self.values.get(field)
        values = value if isinstance(value, list) else [value]
        if not values or not all(_is(v, str | int | float) for v in values):
            raise self.refused(field, "text, a number, or a list of at least one of them")
        return tuple(str(v) for v in values)

    def rows(self, field: str) -> list[Row]:
        """The objects of a list, as rows of their own."""
        values = self._list(field, Mapping, "a list of objects")
        return [
            Row(self.place, i + 1, value, f"{self.within}{field}[{i}].")
            for i, value in enumerate(values)
        ]

    def refused(self, field: str, allowed: str) -> ValueError:
        """The error that says what the field is, and what it may be."""
        if field in self.values:
            came = repr(self.values[field])
            came = "is " + (came if len(came) <= 60 else came[:57] + "...")
        else:
            came = "is missing"
        return ValueError(f"{self.place}: field '{self.within}{field}' {came}; allowed: {allowed}")

    def _checked(self, field: str, kind: Any, allowed: str) -> Any:
        value = self.values.get(field)
        if not _is(value, kind):
            raise self.refused(field, allowed)
        return value

    def _list(self, field: str, kind: Any, allowed: str) -> list[Any]:
        values = self.values.get(field)
        if not isinstance(values, list) or not all(_is(v, kind) for v in values):
            raise self.refused(field, allowed)
        return values


def rows(path: Path, names: Sequence[str]) -> Iterator[Row]:
    """Every row of a file, or of the file of a directory that has one of `names`.

    In a directory, and in its `data`, a name is sought as `name.jsonl`, `name.json`,
    `name.parquet`, and as the parts `name/*.parquet` and `name-*.parquet` of a data set from a
    hub, the test split alone where there is one. `hub:organisation/name` is downloaded.

    Raises:
      Absent: there is no such file.
      ValueError: a line is empty or not JSON, a row is not an object, or there is none.
      ImportError: parquet without pyarrow; the message names the extra.
    """
    number = 0
    for file in found(path, names):
        before = number
        for row in _read(file):
            # Numbers go on over the parts of a data set, so that each row has its own.
            number = before + row.number
            yield row if before == 0 else dataclasses.replace(row, number=number)
    if number == 0:
        raise ValueError(f"{path}: holds no samples; allowed: at least one")


def source(path: Path, names: Sequence[str]) -> Path:
    """The file that `rows` reads, or the first of its parts; errors as in `found`."""
    return found(path, names)[0]


def found(path: Path, names: Sequence[str], endings: Sequence[str] = _ENDINGS) -> list[Path]:
    """The file, or the parts of the file, with one of `names`.

    Raises:
      Absent: there is none.
    """
    path = hub.local(path, names).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise Absent(f"{path}: no such file or directory")
    for folder in (path, path / "data"):
        for name in names:
            for ending in endings:
                if (folder / f"{name}{ending}").is_file():
                    return [folder / f"{name}{ending}"]
            parts = sorted([*folder.glob(f"{name}/*.parquet"), *folder.glob(f"{name}-*.parquet")])
            if parts:
                return [p for p in parts if p.name.startswith("test")] or parts
    sought = ", ".join(f"{name}{ending}" for name in names for ending in endings)
    raise Absent(f"{path}: has none of {sought}, neither there nor in data/")


def _read(file: Path) -> Iterator[Row]:
    if file.suffix == ".parquet":
        yield from _parquet(file)
        return
    with file.open(encoding="utf-8") as handle:
        first = handle.read(1)
        while first.isspace():
            first = handle.read(1)
        handle.seek(0)
        if first == "[":
            yield from _array(file, handle.read())
            return
        for number, line in enumerate(handle, 1):
            place = f"{file.name} line {number}"
            if not line.strip():
                raise ValueError(f"{place}: is empty; allowed: one JSON object a line")
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{place}: is not JSON ({error}); allowed: one JSON object a line"
                ) from None
            yield _row(place, number, value)


def _array(file: Path, text: str) -> Iterator[Row]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{file.name}: is not JSON ({error}); allowed: an array of objects"
        ) from None
    for number, value in enumerate(values, 1):
        yield _row(f"{file.name} entry {number}", number, value)


def _parquet(file: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError(
            f"{file.name}: reading parquet needs pyarrow: pip install 'kvjax[eval]'"
        ) from None
    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file.name}: is not parquet ({error})") from None
    number = 0
    for batch in table.iter_batches(batch_size=64):
        for value in batch.to_pylist():
            number += 1
            yield _row(f"{file.name} row {number}", number, value)


def _row(place: str, number: int, value: Any) -> Row:
    if not isinstance(value, Mapping):
        raise ValueError(f"{place}: is a {type(value).__name__}; allowed: an object")
    return Row(place, number, value)


def _is(value: Any, kind: Any) -> bool:
    # True and False are numbers to Python, and never what a data set means by one.
    return isinstance(value, kind) and not isinstance(value, bool)
