"""Samples from files: how an official prompt is cut in two, and what they all have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eval.tasks.base import Sample


def prompt_parts(template: str, field: str, **fields: Any) -> tuple[str, str]:
    """`template.format(**fields)` cut behind `{field}`, the long document.

    The two parts and the line break that a sample puts between them are the official prompt,
    except that a break is inserted where it has none at the seam.
    """
    head, found, tail = template.partition(f"{{{field}}}")
    if not found or f"{{{field}}}" in tail:
        raise ValueError(f"template: has {{{field}}} not exactly once")
    return cut(head.format(**fields) + str(fields[field]), tail.format(**fields))


def cut(before: str, after: str) -> tuple[str, str]:
    """`before` and `after` without the line break at the seam, which a sample puts there itself."""
    if after.startswith("\n"):
        return before, after[1:]
    return before.removesuffix("\n"), after


def sample(
    *,
    task: str,
    subset: str,
    key: object,
    context: str,
    question: str,
    answers: Iterable[str],
    max_new_tokens: int,
    chat: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> Sample:
    """A sample read from a file; `key` is its id within the subset."""
    name = f"{task}/{subset}" if subset else task
    return Sample(
        id=f"{name}/{key}",
        task=name,
        haystack="documents",
        seed=0,
        depth=None,
        length=None,
        context=context,
        question=question,
        answer_prefix="",
        answers=tuple(answers),
        max_new_tokens=max_new_tokens,
        chat=chat,
        metadata=dict(metadata or {}),
    )


def check_subset(task: str, subset: str, allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    if subset not in allowed:
        raise ValueError(f"task {task}: subset {subset!r}; allowed: {', '.join(allowed)}")


def distinct(samples: list[Sample]) -> list[Sample]:
    """The samples, if no two have one id. Raises ValueError naming the id otherwise."""
    seen: set[str] = set()
    for s in samples:
        if s.id in seen:
            raise ValueError(f"sample {s.id}: occurs twice; allowed: ids that differ")
        seen.add(s.id)
    return samples
