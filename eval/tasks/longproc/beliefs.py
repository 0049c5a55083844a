"""LongProc's theory-of-mind tracking: who believes what after each step of a story.

Source: LongProc longproc/tom_tracking_evaluator.py.
"""

from __future__ import annotations

import re
import string

_DROPPED = re.compile(
    r"\b(a|an|the|on|in|at|the|step|thinks|think|believes|believe|is|are|of|location|know|knows"
    r"|belief)\b"
)
_FIRST = "- Step 0:"


def same_beliefs(reply: str, answer: str) -> bool:
    """Whether the steps of the reply's last trace are those of the answer.

    Lines "- Step 3: ..." are compared without case, punctuation and small words, and their number
    has to be the same.
    """
    trace = _dashed(reply)
    if _FIRST in trace:
        trace = trace[trace.rindex(_FIRST) :]
    return _steps(trace) == _steps(_dashed(answer))


def _dashed(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.strip().startswith("-"))


def _steps(trace: str) -> list[str]:
    lines = [line for line in trace.strip().split("\n") if re.match(r"- Step \d+:", line)]
    return [step for step in map(_normal_form, lines) if step]


def _normal_form(line: str) -> str:
    text = line.split("-", 1)[1].strip().lower()
    text = "".join(c for c in text if c not in string.punctuation + "’")
    return " ".join(_DROPPED.sub(" ", text).split())
