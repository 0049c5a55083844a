"""What a training run reads, from YAML mappings checked at the door.

    data:
      - task: ruler            # samples of an evaluation task, made as they are needed
        subsets: [niah_single_2, niah_multikey_1]
        haystacks: [sentences, prose]
        lengths: [256, 512]    # tokens of the prompt, from and to
        weight: 2
      - text: data/books/*.txt
      - chat: data/chat.jsonl
      - erase: [neighbour]     # contexts of which a span is to be erased, for kind: eraser alone
        haystacks: [sentences]
        lengths: [200, 400]    # tokens of the context
        span_tokens: [16, 100]

Weights are shares of examples, before packing: a document, a conversation, a sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from eval import fields
from eval.config import haystack
from eval.erasing.suites import SUITES
from eval.tasks import TASKS
from eval.tasks.ruler import question_answering

MOST_KEYS = 40  # places that RULER draws from

_DOCUMENTS = ("blocks", "files")
_LONG = ("cut", "drop")
_LABELS = ("answers", "all")
_GENERATED = tuple(name for name, task in TASKS.items() if task.make is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Documents to be predicted token by token."""

    text: tuple[str, ...]  # files, directories, globs: plain text, JSONL, JSON, parquet
    field: str = "text"  # of the rows of JSONL, JSON and parquet
    documents: str = "blocks"  # or "files": one document per file of plain text
    characters: int = 20_000  # up to which blocks between empty lines are one document
    long: str = "cut"  # documents longer than a row are cut into rows, or "drop"ped
    weight: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Conversations, of which the assistant's turns are to be predicted."""

    chat: tuple[str, ...]  # files, directories, globs: JSONL, JSON, parquet
    field: str = "messages"
    labels: str = "answers"  # or "all"
    long: str = "cut"
    weight: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Samples of a generated task with their answers, of which the answers are to be predicted."""

    task: str
    lengths: tuple[int, int]  # tokens of the prompt, both included
    subsets: tuple[str, ...] = ()  # () for all that need no file
    haystacks: tuple[str, ...] = ()  # () for those that the task is defined with
    keys: int = 1  # needles with different keys, of which one is asked for; task needle
    depths: tuple[float, float] = (0.0, 1.0)  # of what is asked for, from and to; task needle
    path: str | None = None  # file of questions, for ruler's qa: of the training split
    labels: str = "answers"
    weight: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErasedConfig:
    """Samples of erasing's suites, of which the right answers are to be predicted."""

    erase: tuple[str, ...]  # suites
    lengths: tuple[int, int]  # tokens of the context, both included
    span_tokens: tuple[int, int] = (100, 100)  # at most
    haystacks: tuple[str, ...] = ("prose",)
    inserted: tuple[str, ...] = ()  # what spans are filled up with; () for the haystacks
    weight: float = 1.0


type SourceConfig = TextConfig | ChatConfig | TaskConfig | ErasedConfig


def read(key: str, content: Any) -> tuple[SourceConfig, ...]:
    """The sources in a list of mappings; `key` is the list's name in messages.

    Raises:
      ValueError: in one line: the key, what was given, what is allowed.
    """
    return tuple(_source(f"{key}[{i}]", item) for i, item in enumerate(fields.items(key, content)))


def mapping(source: SourceConfig) -> dict[str, Any]:
    """The mapping from which `read` makes `source`."""
    content = dataclasses.asdict(source)
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in content.items()
        if value not in (None, ())
    }


def _source(key: str, content: Any) -> SourceConfig:
    readers: dict[str, Callable[[str, Any], SourceConfig]]
    readers = {"text": _text, "chat": _chat, "task": _task, "erase": _erase}
    if not isinstance(content, dict):
        raise fields.error(key, content, f"a mapping with one of the keys {', '.join(readers)}")
    kinds = [kind for kind in readers if kind in content]
    if len(kinds) != 1:
        given = ", ".join(map(str, content)) or "none"
        raise ValueError(
            f"{key}: has the keys {given}; exactly one of {', '.join(readers)} is needed"
        )
    return readers[kinds[0]](key, content)


def _text(key: str, content: Any) -> TextConfig:
    given = fields.mapping(key, content, TextConfig, required=("text",))
    return _built(
        TextConfig,
        key,
        given,
        text=_paths,
        field=fields.text,
        documents=lambda k, v: fields.choice(k, v, _DOCUMENTS),
        characters=lambda k, v: fields.integer(k, v, 1),
        long=lambda k, v: fields.choice(k, v, _LONG),
        weight=fields.positive,
    )


def _chat(key: str, content: Any) -> ChatConfig:
    given = fields.mapping(key, content, ChatConfig, required=("chat",))
    return _built(
        ChatConfig,
        key,
        given,
        chat=_paths,
        field=fields.text,
        labels=lambda k, v: fields.choice(k, v, _LABELS),
        long=lambda k, v: fields.choice(k, v, _LONG),
        weight=fields.positive,
    )


def _task(key: str, content: Any) -> TaskConfig:
    given = fields.mapping(
        key,
        content,
        TaskConfig,
        required=("task", "lengths"),
        aliases={"haystack": "haystacks", "length": "lengths", "subset": "subsets"},
    )
    task = TASKS[fields.choice(f"{key}.task", given["task"], _GENERATED)]
    if "subsets" in given and not task.subsets:
        raise _foreign(key, "subsets", task.name)
    config = _built(
        TaskConfig,
        key,
        given,
        task=fields.text,
        lengths=_lengths,
        subsets=lambda k, v: _each(k, v, lambda k, v: fields.choice(k, v, task.subsets)),
        haystacks=lambda k, v: _each(k, v, haystack),
        keys=lambda k, v: fields.integer(k, v, 1),
        depths=_depths,
        path=fields.text,
        labels=lambda k, v: fields.choice(k, v, _LABELS),
        weight=fields.positive,
    )
    foreign = {
        "keys": config.keys != 1 and task.name != "needle",
        "depths": config.depths != (0.0, 1.0) and task.name != "needle",
        "path": config.path is not None and not task.subsets,
    }
    for field, refused in foreign.items():
        if refused:
            raise _foreign(key, field, task.name)
    if config.keys > MOST_KEYS:
        raise fields.error(f"{key}.keys", config.keys, f"integers from 1 to {MOST_KEYS}")
    for subset in config.subsets:
        if subset in question_answering.FORMATS and config.path is None:
            raise ValueError(f"missing key 'path' in {key}: {subset} needs a file of questions")
    return config


def _foreign(key: str, field: str, task: str) -> ValueError:
    return ValueError(f"{key}.{field}: task {task} does not take it; leave it out")


def _erase(key: str, content: Any) -> ErasedConfig:
    given = fields.mapping(
        key,
        content,
        ErasedConfig,
        required=("erase", "lengths"),
        aliases={"haystack": "haystacks", "length": "lengths"},
    )
    return _built(
        ErasedConfig,
        key,
        given,
        erase=lambda k, v: _each(k, v, lambda k, v: fields.choice(k, v, tuple(SUITES))),
        lengths=_lengths,
        span_tokens=_lengths,
        haystacks=lambda k, v: _each(k, v, haystack),
        inserted=lambda k, v: _each(k, v, haystack),
        weight=fields.positive,
    )


def _built[C](cls: type[C], key: str, given: dict[str, Any], **readers: Callable[..., Any]) -> C:
    """The dataclass with every field that was given, read by its reader."""
    values = {name: readers[name](f"{key}.{name}", value) for name, value in given.items()}
    return cls(**values)


def _each(key: str, content: Any, read: Callable[[str, Any], Any]) -> tuple[Any, ...]:
    content = [content] if isinstance(content, str) else content
    values = tuple(read(f"{key}[{i}]", v) for i, v in enumerate(fields.items(key, content)))
    fields.unique(key, values)
    return values


def _paths(key: str, content: Any) -> tuple[str, ...]:
    return _each(key, content, fields.text)


def _lengths(key: str, content: Any) -> tuple[int, int]:
    bounds = [content, content] if isinstance(content, int) else content
    if (
        not isinstance(bounds, list)
        or len(bounds) != 2
        or any(isinstance(b, bool) or not isinstance(b, int) or b < 1 for b in bounds)
        or bounds[0] > bounds[1]
    ):
        raise fields.error(key, content, "a number of tokens >= 1, or two of them, [from, to]")
    return bounds[0], bounds[1]


def _depths(key: str, content: Any) -> tuple[float, float]:
    bounds = list(content) if isinstance(content, list | tuple) else [content, content]
    numbers = [b for b in bounds if isinstance(b, int | float) and not isinstance(b, bool)]
    if not len(numbers) == len(bounds) == 2 or not 0 <= numbers[0] <= numbers[1] <= 1:
        raise fields.error(key, content, "a share of the context in [0, 1], or two, [from, to]")
    return float(numbers[0]), float(numbers[1])
