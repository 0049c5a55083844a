"""Numbers a reply names."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_DIGITS = re.compile(r"\d+")
_DECIMAL = re.compile(r"\d+\.\d+|\d+")


def share_of_numbers(reply: str, number: str) -> float:
    """Share of the reply's whole numbers that are `number`, compared as text; 0 where none is.

    Source: LongBench metrics.py `count_score`, `retrieval_score` and `retrieval_zh_score`.
    """
    found = _DIGITS.findall(reply)
    return found.count(number) / len(found) if found else 0.0


def first_digits(reply: str) -> str:
    """The first run of the digits 0 to 9, "" where there is none.

    Source: InfiniteBench compute_scores.py `first_int_match`.
    """
    match = re.search("[0-9]+", reply)
    return match[0] if match else ""


def first_number_is(reply: str, number: str) -> float:
    """1 where the first number of the reply equals `number`, signs ignored.

    A whole `number` is compared with the whole part of the reply's. Source: SCBench
    compute_scores.py `get_score_one_math_find`; InfiniteBench's stops with an error where a whole
    number is asked for and the reply begins with a decimal one.
    """
    match = _DECIMAL.search(reply)
    if match is None or math.isinf(found := float(match[0])):
        return 0.0
    return float((int(found) if _whole(number) else found) == float(number))


def leading_numbers(reply: str, numbers: Sequence[str]) -> float:
    """Share of `numbers` before the first that the reply's numbers, read in order, do not match.

    Signs of the reply are ignored, so that a negative number never matches: so it is in the
    official scorer. Source: InfiniteBench compute_scores.py `get_score_one_math_calc`.
    """
    right = 0
    for found, number in zip(re.findall("[0-9]+", reply), numbers, strict=False):
        # As texts, since a reply may repeat a digit more often than Python reads as a number.
        if found.lstrip("0") != number.lstrip("0"):
            break
        right += 1
    return right / len(numbers)


def _whole(number: str) -> bool:
    return re.fullmatch(r"[+-]?\d+", number) is not None
