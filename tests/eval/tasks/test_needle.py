"""The needle: there once, where asked, at the length asked for."""

from __future__ import annotations

import dataclasses
import hashlib
import re

import pytest

from eval import haystacks
from eval.tasks import TASKS
from eval.tasks.base import Request

LENGTHS = (150, 500, 1000, 4000)


def count(context: str, question: str, answer_prefix: str) -> int:
    """Words, digits, marks and line breaks of one chat turn."""
    text = f"<user>{context}\n{question}<assistant>{answer_prefix}"
    return len(re.findall(r"[A-Za-z]+|\d|[^\w ]", text))


@pytest.fixture(params=["noise", "sentences", "prose", "file"])
def haystack(request, tmp_path):
    if request.param != "file":
        return haystacks.load(request.param)
    path = tmp_path / "book.txt"
    path.write_text("It was a dark night. Rain fell; nobody\ncame.\n\nThen the bell rang. Twice.\n")
    return haystacks.load(f"file:{path}")


def make(haystack, length=500, depth=0.5, seed=0):
    return TASKS["needle"].make(
        Request(
            subset="", haystack=haystack, length=length, depth=depth, seed=seed, count_tokens=count
        )
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_whole_prompt_is_within_two_percent_of_the_length(haystack, length):
    for seed in range(3):
        sample = make(haystack, length, seed / 2, seed)
        tokens = count(sample.context, sample.question, sample.answer_prefix)
        assert 0.98 * length <= tokens <= length


@pytest.mark.parametrize("depth", [0, 0.1, 0.5, 0.77, 1])
def test_key_and_number_are_in_the_context_exactly_once(haystack, depth):
    for seed in range(5):
        sample = make(haystack, depth=depth, seed=seed)
        (value,) = sample.answers
        assert len(value) == 7 and value.isdigit() and value[0] != "0"
        assert sample.context.count(value) == 1
        assert sample.context.count(sample.metadata["key"]) == 1
        assert value not in sample.question + sample.answer_prefix


@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 0.75, 1])
def test_needle_stands_at_the_depth(haystack, depth):
    sample = make(haystack, 2000, depth)
    start, end = sample.metadata["needle_span"]
    assert sample.context[start:end] == sample.metadata["needle"]
    body = sample.context.index("\n") + 1
    found = (start - body) / (len(sample.context) - body - (end - start))
    assert found == pytest.approx(depth, abs=0.05)


def test_needle_in_noise_has_a_line_of_its_own():
    for depth in (0, 0.3, 1):
        sample = make(haystacks.load("noise"), depth=depth)
        assert sample.metadata["needle"] in sample.context.split("\n")


def test_same_seed_gives_the_same_sample_and_another_seed_another(haystack):
    assert make(haystack) == make(haystack)
    first, second = make(haystack, seed=1), make(haystack, seed=2)
    assert first.answers != second.answers and first.metadata["key"] != second.metadata["key"]


def test_a_length_too_short_for_the_template_is_refused(haystack):
    with pytest.raises(ValueError, match=r"length=20: too short for task needle; allowed .* >= \d"):
        make(haystack, 20)


def test_no_haystack_or_no_depth_is_refused(haystack):
    with pytest.raises(ValueError, match=r"haystack=None, depth=0.5: task needle needs a haystack"):
        make(None)
    with pytest.raises(ValueError, match=r"haystack='.*', depth=None: .* a depth in \[0, 1\]"):
        make(haystack, depth=None)


def test_contexts_are_those_of_earlier_versions():
    # Results of different versions are compared with one another by sample.
    samples = [make(haystacks.load("noise"), 700, d, s) for d in (0, 0.5, 1) for s in range(3)]
    text = "".join(s.id + s.context + s.question for s in samples)
    assert hashlib.sha256(text.encode()).hexdigest() == (
        "e8fe7efc56a988343a291a6448c98a2515d92a9c6afbf2efd47beadbad571614"
    )


def test_score_is_the_share_of_answers_in_the_text():
    sample, score = make(haystacks.load("noise")), TASKS["needle"].score
    sample = dataclasses.replace(sample, answers=("1234567",))
    assert score(sample, "it is 1234567.") == 1
    assert score(sample, "it is 123456.") == 0
    assert score(dataclasses.replace(sample, answers=("Red", "blue")), "RED and green") == 0.5
