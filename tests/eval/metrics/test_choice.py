"""Multiple choice: letters found as the official scorers find them."""

from __future__ import annotations

import pytest

from eval.metrics.choice import chose, chose_function, stated_letter


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("The correct answer is (B).", "B"),
        ("**The correct answer is C**", "C"),
        ("The correct answer is **(D)**", "D"),
        ("Not A. The correct answer is A, not (B).", "A"),
        ("the correct answer is (A)", None),
        ("B", None),
        ("The correct answer is (E)", None),
    ],
)
def test_stated_letter(reply, letter):
    assert stated_letter(reply) == letter


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("B. Anna", True),
        ("  B", True),
        ("A", False),
        ("Anna", False),  # begins with A, which is another option
        ("Berta", True),
        ("Carl", False),
        ("Zoe", True),
        ("I think the answer is B", True),
        ("I think the answer is: A", False),
        ("Surely the answer is", False),
        ("well, B or A", True),
        ("well, D", False),
        ("", False),
    ],
)
def test_chose(reply, right):
    assert chose(reply, ["Zoe", "B"]) == right


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("B. f", True),
        ("B: f", True),
        ("A. parse", False),
        ("The answer is: B", True),
        ("The answer is:\nparse", True),
        ("answer: `parse`", True),
        ("The answer is: A. The answer is: B", False),
        ("B", False),  # the official scorer wants a mark behind the letter
        ("The answer is:", False),
    ],
)
def test_chose_function(reply, right):
    assert chose_function(reply, "parse", "B") == right
