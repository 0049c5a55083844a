"""Final answers of mathematics, and which of them are the same."""

from __future__ import annotations

import pytest

from eval.metrics.mathematics import final_answer, same_answer


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (r"So \boxed{12}. No: \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\text{A} \cup \{1, \{2\}\}}", r"\text{A} \cup \{1, \{2\}\}"),
        (r"\fbox{3}", "3"),
        (r"$\boxed 7$ is it", "7"),
        (r"\boxed{4} and then \boxed{unfinished", "4"),
        ("2 + 3 = 5\n#### 1,205\n", "1,205"),
        ("first 3, then it costs $1,234.50.", "1,234.50"),
        ("from 7 to -8", "-8"),
        ("7-8", "8"),
        ("no numbers", None),
        ("", None),
        (r"<think>\boxed{1}</think> It is 2.", "2"),
        (r"<think>It is \boxed{1}</think>", "1"),
        (r"<think>It is \boxed{1}", "1"),
    ],
)
def test_final_answer(reply, answer):
    assert final_answer(reply) == answer


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        ("18", "18"),
        ("18.0", "18"),
        ("1,234", "1234"),
        ("$18$.", "18"),
        (r"18\%", "18"),
        ("018", "18"),
        (r"\dfrac{1}{2}", r"\frac12"),
        ("1/2", r"\frac{1}{2}"),
        ("0.5", r"\frac{1}{2}"),
        (".5", "0.5"),
        (r"-\frac{1}{2}", r"\frac{-1}{2}"),
        (r"\frac{2}{4}", "1/2"),
        ("x = 5", "5"),
        ("5 cm", "5"),
        (r"5\text{ cm}^2", "5"),
        (r"90^\circ", "90"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\left(3,\frac{\pi}{2}\right)"),
        ("(0.5, 2)", r"(\frac{1}{2},2)"),
        (r"\{1, 0.5\}", r"\{1,1/2\}"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\text{(C)}", "C"),
        (r"3\sqrt2", r"3\sqrt{2}"),
        (r"p - q", "p-q"),
    ],
)
def test_same_answers(found, answer):
    assert same_answer(found, answer) and same_answer(answer, found)


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        ("18", "81"),
        ("-18", "18"),
        ("0.33", r"\frac{1}{3}"),
        (r"\frac{1}{2}", r"\frac{2}{1}"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "[1,2]"),
        ("(1,2)", "(1,2,3)"),
        ("x+1", "x-1"),
        ("3 x", "3"),
        (r"\frac{1}{0}", "0"),
        ("", "0"),
        (None, "0"),
        ("9" * 5000, "9"),
    ],
)
def test_different_answers(found, answer):
    assert not same_answer(found, answer)
