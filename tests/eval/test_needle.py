"""The needle: there once, where asked, at the length asked for."""

from __future__ import annotations

import random

import pytest

from eval import haystacks
from eval.prompt import Prompter
from eval.tasks import TASKS
from tests.eval.fakes import WordTokenizer

LENGTHS = (150, 500, 1000, 4000)


@pytest.fixture(scope="module")
def prompter():
    return Prompter(WordTokenizer())


@pytest.fixture(params=["noise", "prose", "file"])
def haystack(request, tmp_path):
    if request.param != "file":
        return haystacks.load(request.param)
    path = tmp_path / "book.txt"
    path.write_text("It was a dark night. Rain fell; nobody\ncame.\n\nThen the bell rang. Twice.\n")
    return haystacks.load(f"file:{path}")


def make(haystack, prompter, length=500, depth=0.5, seed=0):
    return TASKS["needle"].make(haystack, length, depth, seed, prompter.count)


@pytest.mark.parametrize("length", LENGTHS)
def test_whole_prompt_is_within_two_percent_of_the_length(haystack, prompter, length):
    for seed in range(3):
        prompt = prompter.prompt(make(haystack, prompter, length, seed / 2, seed))
        assert 0.98 * length <= len(prompt.prefill) + len(prompt.question) <= length


@pytest.mark.parametrize("depth", [0, 0.1, 0.5, 0.77, 1])
def test_key_and_number_are_in_the_context_exactly_once(haystack, prompter, depth):
    for seed in range(5):
        sample = make(haystack, prompter, depth=depth, seed=seed)
        (value,) = sample.answers
        assert len(value) == 7 and value.isdigit() and value[0] != "0"
        assert sample.context.count(value) == 1
        assert sample.context.count(sample.metadata["key"]) == 1
        assert value not in sample.question + sample.answer_prefix


@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 0.75, 1])
def test_needle_stands_at_the_depth(haystack, prompter, depth):
    sample = make(haystack, prompter, 2000, depth)
    start, end = sample.metadata["needle_span"]
    assert sample.context[start:end] == sample.metadata["needle"]
    body = sample.context.index("\n") + 1
    found = (start - body) / (len(sample.context) - body - (end - start))
    assert found == pytest.approx(depth, abs=0.05)


def test_needle_in_noise_has_a_line_of_its_own(prompter):
    for depth in (0, 0.3, 1):
        sample = make(haystacks.load("noise"), prompter, depth=depth)
        assert sample.metadata["needle"] in sample.context.split("\n")


def test_same_seed_gives_the_same_sample_and_another_seed_another(haystack, prompter):
    assert make(haystack, prompter) == make(haystack, prompter)
    first, second = make(haystack, prompter, seed=1), make(haystack, prompter, seed=2)
    assert first.answers != second.answers and first.metadata["key"] != second.metadata["key"]


def test_a_length_too_short_for_the_template_is_refused(haystack, prompter):
    with pytest.raises(ValueError, match=r"length=20: too short for task needle; allowed .* >= \d"):
        make(haystack, prompter, 20)


def test_score_is_the_share_of_answers_in_the_text():
    score = TASKS["needle"].score
    assert score(("1234567",), "it is 1234567.") == 1
    assert score(("1234567",), "it is 123456.") == 0
    assert score(("Red", "blue"), "RED and green") == 0.5


def test_prose_reads_as_prose():
    text = "".join(haystacks.load("prose").sentences)
    assert len(text) > 50_000
    assert not any(mark in text for mark in ("::=", ">>>", "***", "==="))
    markup = (
        'Title\n*****\n\nA *callable* takes **all** of the built-\nin arguments [3] that "it" is '
        "given by a caller.\n\n   code = 1\n\n* a list item that is long enough to look like prose"
    )
    assert haystacks.prose_paragraphs(markup) == [
        'A callable takes all of the built-in arguments that "it" is given by a caller.'
    ]


def test_prose_starts_elsewhere_with_another_seed():
    prose = haystacks.load("prose")
    assert next(prose.stream(random.Random(1))) != next(prose.stream(random.Random(2)))


@pytest.mark.parametrize("content", [None, b"", b" \n\n ", b"\xff\xfe\x00"])
def test_a_file_without_text_is_refused_with_its_name(tmp_path, content):
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"mine\.txt"):
        haystacks.load(f"file:{path}")


def test_an_unknown_haystack_is_refused():
    with pytest.raises(ValueError, match="'hay': allowed are noise, prose and file:PATH"):
        haystacks.load("hay")
