"""What an evaluation of erasing runs, read from YAML: suites, spans, methods."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval import fields
from eval.config import PolicyConfig, haystack, policy
from eval.erasing.suites import SEVERAL, SUITES


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErasingConfig:
    """One evaluation of erasing: every suite at every length, span length and number of spans.

    `none` and `recompute`, the two ends of the scale, are always run. Several spans are asked of
    the suites that have them.
    """

    model: str
    suites: tuple[str, ...]
    lengths: tuple[int, ...]  # tokens of the context, spans included
    samples: int  # of every cell
    methods: tuple[PolicyConfig, ...]
    haystacks: tuple[str, ...] = ("prose",)
    inserted: str = "sentences"  # what spans are filled up with
    span_tokens: tuple[int, ...] = (64,)
    spans: tuple[int, ...] = (1,)
    eraser: str | None = None  # directory of a trained eraser; None: the one that ships
    max_new_tokens: int = 24
    seed: int = 0
    output: str = "runs/erasing"

    @property
    def hash(self) -> str:
        """Of all that changes a result; more samples or another directory leave it as it is."""
        content = dataclasses.asdict(self)
        del content["output"], content["samples"]
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_erasing(content: Any) -> bool:
    """Whether a YAML file's content is a config of erasing."""
    return isinstance(content, Mapping) and "methods" in content


def load(path: str | Path) -> ErasingConfig:
    """Reads a YAML file.

    Raises:
      ValueError: in one line: the key, what was given, what is allowed.
    """
    try:
        return from_mapping(fields.yaml_file(path))
    except ValueError as error:
        raise ValueError(f"config {str(path)!r}: {error}") from error


def from_mapping(content: Any) -> ErasingConfig:
    """Checks and builds; errors as in `load`, without the path."""
    given = fields.mapping(
        "the file",
        content,
        ErasingConfig,
        required=("model", "suites", "lengths", "samples", "methods"),
    )

    def each(name: str, read: Any) -> tuple[Any, ...]:
        items = fields.items(name, given[name])
        found = tuple(read(f"{name}[{i}]", item) for i, item in enumerate(items))
        fields.unique(name, found)
        return found

    values: dict[str, Any] = {
        "model": fields.text("model", given["model"]),
        "suites": each("suites", lambda k, v: fields.choice(k, v, tuple(SUITES))),
        "lengths": each("lengths", lambda k, v: fields.integer(k, v, 1)),
        "samples": fields.integer("samples", given["samples"], 1),
        "methods": each("methods", policy),
    }
    for name in ("span_tokens", "spans"):
        if name in given:
            values[name] = each(name, lambda k, v: fields.integer(k, v, 1))
    if "haystacks" in given:
        values["haystacks"] = each("haystacks", haystack)
    if "inserted" in given:
        values["inserted"] = haystack("inserted", given["inserted"])
    if "eraser" in given:
        values["eraser"] = fields.text("eraser", given["eraser"])
    if "output" in given:
        values["output"] = fields.directory("output", given["output"])
    for name, least in (("max_new_tokens", 1), ("seed", 0)):
        if name in given:
            values[name] = fields.integer(name, given[name], least)
    if max(values.get("spans", (1,))) > 1 and not set(values["suites"]) & set(SEVERAL):
        raise fields.error("spans", list(values["spans"]), f"1, or with {', '.join(SEVERAL)}")
    fields.unique("methods", [method.label for method in values["methods"]])
    return ErasingConfig(**values)
