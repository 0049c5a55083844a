"""RULER: thirteen synthetic tasks, made at any length for the tokenizer at hand.

Definitions, templates, answer prefixes, numbers of new tokens and scores are those of RULER
(arXiv 2404.06654; github.com/NVIDIA/RULER, scripts/synthetic.yaml). Deviations in all of them:

* A length counts the tokens of the prompt with its chat template; RULER's also counts the tokens
  to generate. It is met within 2 %, where RULER's steps leave more out.
* The essays of RULER are not shipped: its "essay" is the haystack "prose" here.
* Every sample has random numbers of its own, seeded by its id.
* Keys and values that have to be told apart always differ.
"""

from __future__ import annotations

from pathlib import Path

from eval.tasks.base import Request, Sample, Task, string_match, string_match_any
from eval.tasks.ruler import (
    niah,
    question_answering,
    question_files,
    variable_tracking,
    word_counting,
)

_MAKERS = {
    **dict.fromkeys(niah.SUBSETS, niah.make),
    "vt": variable_tracking.make,
    "cwe": word_counting.make_cwe,
    "fwe": word_counting.make_fwe,
    **dict.fromkeys(question_answering.FORMATS, question_answering.make),
}
_HAYSTACKS = {name: kinds.haystacks for name, kinds in niah.SUBSETS.items()} | {"vt": ("noise",)}


def make(request: Request) -> Sample:
    """A sample of `request.subset`; `request.depth` is for niah_* only, and places what is asked.

    Raises:
      ValueError: unknown subset, a depth or haystack that does not fit it, an unreachable length,
        a malformed file of questions.
      Absent: a subset of questions without its file.
    """
    subset = request.subset
    if subset not in _MAKERS:
        raise ValueError(f"subset={subset!r}: allowed for task ruler are {', '.join(_MAKERS)}")
    if _HAYSTACKS.get(subset) and request.haystack is None:
        raise ValueError(f"haystack=None: ruler/{subset} needs one, {_HAYSTACKS[subset][0]!r} say")
    if request.depth is not None and not (subset in niah.SUBSETS and 0 <= request.depth <= 1):
        raise ValueError(
            f"depth={request.depth:g} for ruler/{subset}: allowed are none, and in [0, 1] for niah"
        )
    return _MAKERS[subset](request)


def source(path: Path, subset: str) -> Path | None:
    """The file of questions that a subset needs, if it does."""
    format = question_answering.FORMATS.get(subset)
    return None if format is None else question_files.file(path, format, f"ruler/{subset}")


def score(sample: Sample, text: str) -> float:
    """Share of the answers in `text`; for questions about documents, whether any is in it."""
    if sample.task.rpartition("/")[2] in question_answering.FORMATS:
        return string_match_any(sample, text)
    return string_match(sample, text)


TASK = Task(
    name="ruler",
    summary="RULER: needles, variable tracking, word counting and questions in long synthetic text",
    make=make,
    source=source,
    score=score,
    subsets=tuple(_MAKERS),
    haystacks=lambda subset: _HAYSTACKS.get(subset, ()),
)
