"""Multiple choice: which letter a reply names."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LETTERS = "ABCD"
_BEFORE_LETTER = ("answer is:", "answer:", "answer is", "option is")
_BEFORE_FUNCTION = ("answer is:", "is:", "answer:", "correct option is:")


def stated_letter(reply: str) -> str | None:
    """The letter after "The correct answer is", in brackets or not, asterisks ignored.

    Source: LongBench v2 pred.py `extract_answer`.
    """
    reply = reply.replace("*", "")
    for pattern in (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"):
        match = re.search(pattern, reply)
        if match:
            return match[1]
    return None


def chose(reply: str, accepted: Sequence[str]) -> float:
    """1 where the reply chooses one of `accepted`, the option's letter and its text.

    A reply that begins with A, B, C or D has chosen; else what follows "answer is" and the like
    decides, and else the first word that is a letter.

    Source: InfiniteBench and SCBench compute_scores.py `get_score_one_longbook_choice_eng`.
    """
    reply = reply.strip()
    if not reply:
        return 0.0
    if reply[0] in _LETTERS:
        return float(reply[0] in accepted)
    if reply in accepted:
        return 1.0
    reply = _spaced(reply, "\n\"'.,?!{}")
    after = _after_first(reply, _BEFORE_LETTER)
    if after is not None:
        return float(any(after.startswith(a) for a in accepted))
    # As in the official scorer, the neighbours AB, BC, CD and longer runs pass for a letter too.
    word = next((w for w in reply.split() if w in _LETTERS), None)
    return float(word in accepted)


def chose_function(reply: str, name: str, letter: str) -> float:
    """1 where the reply chooses the option `letter`, or the function `name` that stands there.

    Source: InfiniteBench compute_scores.py `get_score_one_code_debug`.
    """
    reply = reply.strip()
    if reply[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    for dropped in ("\n", "`", "'", '"', "-", "*", "Option", "option"):
        reply = reply.replace(dropped, " ")
    after = _after_first(re.sub(" +", " ", reply), _BEFORE_FUNCTION)
    return float(after is not None and after.startswith((letter, name)))


def _spaced(text: str, characters: str) -> str:
    """`text` with each of `characters` as a space, and no two spaces together."""
    return re.sub(" +", " ", "".join(" " if c in characters else c for c in text))


def _after_first(text: str, openings: Sequence[str]) -> str | None:
    """What follows, one character on, the first of `openings` that occurs in the text."""
    for opening in openings:
        if opening in text:
            return text[text.index(opening) + len(opening) + 1 :]
    return None
