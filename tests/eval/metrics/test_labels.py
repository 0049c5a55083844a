"""Classification and numbers, with values by hand."""

from __future__ import annotations

import pytest

from eval.metrics.labels import classification
from eval.metrics.numerals import first_digits, first_number_is, leading_numbers, share_of_numbers

CLASSES = ["Disease", "Disease and medicine", "Food", "City"]


@pytest.mark.parametrize(
    ("reply", "answer", "score"),
    [
        ("Food", "Food", 1),
        ("Food or City", "Food", 1 / 2),
        ("City", "Food", 0),
        ("nothing", "Food", 0),
        # A label that is part of the right one does not count against it ...
        ("Disease and medicine", "Disease and medicine", 1),
        # ... and a longer label that holds the right one does.
        ("Disease and medicine", "Disease", 1 / 2),
    ],
)
def test_score_is_one_over_the_labels_named(reply, answer, score):
    assert classification(reply, answer, CLASSES) == score


def test_the_label_after_a_removed_one_is_not_examined():
    # A and B are both part of AB; the official loop removes A and skips B.
    assert classification("AB", "AB", ["A", "B", "AB"]) == 1 / 2


def test_share_of_the_numbers_of_the_reply():
    assert share_of_numbers("Paragraph 7", "7") == 1
    assert share_of_numbers("7, 17 or 7", "7") == pytest.approx(2 / 3)
    assert share_of_numbers("07", "7") == share_of_numbers("none", "7") == 0


def test_first_digits():
    assert first_digits("key: 00123, 45") == "00123"
    assert first_digits("none") == ""


@pytest.mark.parametrize(
    ("reply", "number", "right"),
    [
        ("45.", "45", True),
        ("It is 45.9", "45", True),
        ("44", "45", False),
        ("44.5 or 45", "44.5", True),
        ("44", "44.0", True),
        ("none", "45", False),
        ("9" * 5000, "45", False),
    ],
)
def test_first_number(reply, number, right):
    assert first_number_is(reply, number) == right


def test_leading_numbers_count_up_to_the_first_wrong_one():
    assert leading_numbers("[34, 2, 58, 37]", ["34", "2", "50", "37"]) == 1 / 2
    assert leading_numbers("34 2", ["34", "2", "50", "37"]) == 1 / 2
    assert leading_numbers("-3", ["-3"]) == 0  # signs are ignored, officially
    assert leading_numbers("", ["1"]) == 0
    assert leading_numbers("0, 04", ["0", "4"]) == 1
    assert leading_numbers("9" * 5000, ["9"]) == 0
