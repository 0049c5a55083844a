"""Values of a configuration file, each refused in one line: key, value given, what is allowed.

`key` is the path to the value as its author sees it: "tasks[0].lengths".
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml


def yaml_file(path: str | Path) -> Any:
    """The content of a YAML file.

    Raises:
      ValueError: no such file, not UTF-8, or not YAML; with the line where it is known.
    """
    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "not UTF-8 text"
        raise ValueError(f"config {str(path)!r}: {reason}; a YAML file is needed") from problem
    try:
        return yaml.safe_load(source)
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        reason = getattr(problem, "problem", None) or "not YAML"
        raise ValueError(f"config {str(path)!r}{where}: {reason}; YAML is needed") from problem


def mapping(
    key: str,
    content: Any,
    cls: type,
    required: tuple[str, ...],
    aliases: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The values of a mapping whose keys are fields of the dataclass `cls`, under their own names.

    `aliases` gives other names under which a field may stand.
    """
    known = tuple(field.name for field in dataclasses.fields(cls))
    if not isinstance(content, Mapping):
        raise error(key, content, f"a mapping with the keys {', '.join(known)}")
    aliases = aliases or {}
    place = "" if key == "the file" else f" in {key}"
    given: dict[str, Any] = {}
    for name, value in content.items():
        field = aliases.get(name, name)
        if field not in known:
            near = suggestion(str(name), known)
            raise ValueError(
                f"unknown key {str(name)!r}{place}: allowed are {', '.join(known)}{near}"
            )
        if field in given:
            raise ValueError(f"key {field!r}{place} is given twice, once as {name!r}; give one")
        given[field] = value
    for name in required:
        if name not in given:
            raise ValueError(f"missing key {name!r}{place}: needed are {', '.join(required)}")
    return given


def items(key: str, content: Any) -> list[Any]:
    """A list with at least one entry."""
    if not isinstance(content, list) or not content:
        raise error(key, content, "a list with at least one entry")
    return content


def text(key: str, content: Any) -> str:
    """A text that is not empty."""
    if not isinstance(content, str) or not content.strip():
        raise error(key, content, "a text that is not empty")
    return content


def directory(key: str, content: Any) -> str:
    """The path of a directory; `~` is the home of whoever runs."""
    return str(Path(text(key, content)).expanduser())


def integer(key: str, content: Any, least: int) -> int:
    """A whole number of at least `least`."""
    if isinstance(content, bool) or not isinstance(content, int) or content < least:
        raise error(key, content, f"integers >= {least}")
    return content


def fraction(key: str, content: Any) -> float:
    """A number in [0, 1]."""
    number = isinstance(content, int | float) and not isinstance(content, bool)
    if not number or math.isnan(content) or not 0 <= content <= 1:
        raise error(key, content, "numbers in [0, 1]")
    return float(content)


def positive(key: str, content: Any) -> float:
    """A number above 0."""
    number = isinstance(content, int | float) and not isinstance(content, bool)
    if not number or not math.isfinite(content) or content <= 0:
        raise error(key, content, "numbers > 0")
    return float(content)


def choice(key: str, content: Any, allowed: tuple[str, ...]) -> str:
    """One of the texts `allowed`."""
    if content not in allowed:
        near = suggestion(str(content), allowed)
        raise error(key, content, f"{', '.join(allowed)}{near}")
    return content


def unique(key: str, items: Iterable[Any]) -> None:
    """Refuses an entry that is there twice."""
    seen: list[Any] = []
    for item in items:
        if item in seen:
            raise ValueError(f"{key}: {_shown(item)} is given twice; give it once")
        seen.append(item)


def suggestion(given: str, known: tuple[str, ...]) -> str:
    """The end of a message that names what `given` was probably meant to be, or nothing."""
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def error(key: str, given: Any, allowed: str) -> ValueError:
    """The error that says what was given for `key` and what is allowed."""
    return ValueError(f"{key}={_shown(given)}: allowed: {allowed}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
