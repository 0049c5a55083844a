"""Questions and their documents, read from SQuAD and HotpotQA files."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eval.tasks.base import Absent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    text: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]  # documents that hold the answer
    near: tuple[str, ...]  # documents about the same matter


@dataclasses.dataclass(frozen=True)
class QuestionFile:
    name: str
    questions: tuple[Question, ...]
    documents: tuple[str, ...]  # all of the file, each once, sorted


@dataclasses.dataclass(frozen=True)
class Format:
    name: str
    parse: Callable[[Any], list[Question]]  # raises ValueError with the place and what is wrong


def read(path: Path | None, format: Format, task: str) -> QuestionFile:
    """The questions of a file, or of the first file of a directory that has this format.

    Raises:
      Absent: no path, nothing there, or no such file in the directory.
      ValueError: the file is not of this format; names the place in it.
    """
    found = file(path, format, task)
    return _read(found, format, found.stat().st_mtime_ns)


def file(path: Path | None, format: Format, task: str) -> Path:
    """The file that `read` takes; errors as there."""
    if path is None:
        raise Absent(f"{task} needs a file of questions: path to {format.name}")
    path = path.expanduser()
    if not path.exists():
        raise Absent(f"{task}: path {str(path)!r} does not exist; allowed: {format.name}")
    return _search(path, format, task) if path.is_dir() else path


@functools.lru_cache(maxsize=4)
def _search(directory: Path, format: Format, task: str) -> Path:
    for path in sorted(directory.glob("*.json")):
        try:
            _read(path, format, path.stat().st_mtime_ns)
        except ValueError:
            continue
        return path
    raise Absent(f"{task}: directory {str(directory)!r} has no *.json file with {format.name}")


@functools.lru_cache(maxsize=2)
def _read(path: Path, format: Format, mtime: int) -> QuestionFile:
    del mtime  # a file that changed is read again
    start = f"file of questions {str(path)!r}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{start}: {error.strerror}; allowed: {format.name}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{start}: not UTF-8 text; allowed: {format.name}") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{start}, line {error.lineno}: not JSON ({error.msg}); allowed: {format.name}"
        ) from error
    try:
        questions = format.parse(content)
    except ValueError as error:
        raise ValueError(f"{start}: {error}; allowed: {format.name}") from error
    if not questions:
        raise ValueError(f"{start}: no question with an answer; allowed: {format.name}")
    documents = {document for q in questions for document in (*q.gold, *q.near)}
    return QuestionFile(path.name, tuple(questions), tuple(sorted(documents)))


def _squad(content: Any) -> list[Question]:
    """SQuAD 1.1 and 2.0; questions that 2.0 marks as impossible are left out, as RULER does."""
    questions = []
    for i, article in enumerate(_field(content, "data", list, "file")):
        at = f"data[{i}]"
        paragraphs = _field(article, "paragraphs", list, at)
        texts = [
            _field(p, "context", str, f"{at}.paragraphs[{j}]") for j, p in enumerate(paragraphs)
        ]
        for j, (paragraph, own) in enumerate(zip(paragraphs, texts, strict=True)):
            near = tuple(dict.fromkeys(text for text in texts if text != own))
            here = f"{at}.paragraphs[{j}]"
            for k, item in enumerate(_field(paragraph, "qas", list, here)):
                place = f"{here}.qas[{k}]"
                answers = tuple(
                    dict.fromkeys(
                        _field(answer, "text", str, f"{place}.answers[{n}]")
                        for n, answer in enumerate(_field(item, "answers", list, place))
                    )
                )
                text = _field(item, "question", str, place)
                if answers and not item.get("is_impossible", False):
                    questions.append(Question(text=text, answers=answers, gold=(own,), near=near))
    return questions


def _hotpot(content: Any) -> list[Question]:
    """HotpotQA with distractors: a list of questions, ten paragraphs with each."""
    if not isinstance(content, list):
        raise ValueError(f"file: {type(content).__name__} where a list is needed")
    questions = []
    for i, item in enumerate(content):
        at = f"[{i}]"
        text, answer = (_field(item, key, str, at) for key in ("question", "answer"))
        paragraphs = {}
        for n, entry in enumerate(_field(item, "context", list, at)):
            title, sentences = _pair(entry, f"{at}.context[{n}]")
            if not isinstance(sentences, list) or not all(isinstance(s, str) for s in sentences):
                raise ValueError(f"{at}.context[{n}][1]: a list of sentences is needed")
            paragraphs[title] = f"{title}\n{''.join(sentences)}"
        facts = _field(item, "supporting_facts", list, at)
        titles = {_pair(f, f"{at}.supporting_facts[{n}]")[0] for n, f in enumerate(facts)}
        gold = tuple(document for title, document in paragraphs.items() if title in titles)
        if len(gold) < len(titles) or not gold:
            raise ValueError(f"{at}.supporting_facts: titles that are in context are needed")
        near = tuple(document for title, document in paragraphs.items() if title not in titles)
        questions.append(Question(text=text, answers=(answer,), gold=gold, near=near))
    return questions


def _field(item: Any, key: str, kind: type, place: str) -> Any:
    if not isinstance(item, dict) or key not in item:
        raise ValueError(f"{place}: {key!r} is missing")
    if not isinstance(item[key], kind):
        given = type(item[key]).__name__
        raise ValueError(f"{place}.{key}: {given} where {kind.__name__} is needed")
    return item[key]


def _pair(entry: Any, place: str) -> tuple[str, Any]:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
        raise ValueError(f"{place}: a list of a title and one more is needed")
    return entry[0], entry[1]


SQUAD = Format("SQuAD JSON (data, paragraphs, context, qas)", _squad)
HOTPOT = Format("HotpotQA distractor JSON (question, answer, context, supporting_facts)", _hotpot)
