"""Erasing's suites: who says what, where, and how long it is."""

from __future__ import annotations

import dataclasses
import re

import pytest

from eval import haystacks
from eval.erasing.samples import Part, distractor_hit, exact_match, normalised, prompt_of
from eval.erasing.suites import SUITES, ErasingRequest, make
from tests.train.data.tokens import StableTokenizer

TOKENIZER = StableTokenizer()
ONE_SPAN = [suite for suite in SUITES if suite not in ("needle-conflict", "unrelated")]


def count(text):
    return len(TOKENIZER.encode(text))


def sample(suite, seed=0, length=500, span_tokens=80, spans=1, haystack="prose"):
    return make(
        ErasingRequest(
            suite=suite,
            haystack=haystacks.load(haystack),
            inserted=haystacks.load("sentences"),
            length=length,
            span_tokens=span_tokens,
            seed=seed,
            count_tokens=count,
            spans=spans,
        )
    )


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize(("length", "span_tokens"), [(400, 40), (900, 200)])
def test_lengths_are_those_asked_for(suite, length, span_tokens):
    for seed in range(4):
        made = sample(suite, seed, length, span_tokens)
        assert 0.88 * length <= count(made.context) <= 1.02 * length
        (span,) = [part.text for part in made.parts if part.erased]
        assert span_tokens - 30 <= count(span) <= span_tokens + 1


@pytest.mark.parametrize("suite", SUITES)
def test_the_span_alone_says_the_distractor_and_the_rest_the_answer(suite):
    for seed in range(8):
        made = sample(suite, seed)
        assert made.parts[0] and not made.parts[0].erased
        spans = " ".join(part.text for part in made.parts if part.erased)
        clean = " ".join(made.clean.split())
        assert made.answer in clean and made.answer not in spans
        if made.distractor is not None:
            assert made.distractor in spans
            if suite != "tool":  # whose distractor is a tool of the list, too
                assert made.distractor not in clean
        assert made.answer not in made.question and made.answer not in made.answer_prefix


@pytest.mark.parametrize("suite", SUITES)
def test_a_request_gives_the_same_sample_and_another_seed_another_one(suite):
    assert sample(suite, 3) == sample(suite, 3)
    assert sample(suite, 3).context != sample(suite, 4).context


def test_neighbours_are_asked_for_forward_and_backward():
    for seed in range(8):
        made = sample("neighbour", seed)
        before, span, behind = (" ".join(part.text.split()) for part in made.parts)
        anchor = re.search('"(.*)"', made.question)[1]
        if seed % 4 == 3:
            assert before.endswith(made.answer) and behind.startswith(anchor)
        else:
            assert before.endswith(anchor) and behind.startswith(made.answer)
            assert made.answer_prefix == f'"{anchor}'
            assert not re.search(r"[.?!]$", before), "the span stands within a sentence"
        assert made.answer not in span and anchor not in span


def test_the_stop_asked_for_follows_the_one_before_the_span():
    for seed in range(8):
        made = sample("order", seed)
        before, span, behind = (part.text for part in made.parts)
        asked = re.search("right after (.*)\\?", made.question)[1]
        assert before.endswith(f", {asked}, ") and behind.startswith(f"{made.answer}, ")
        assert span.startswith(f"{made.distractor}, ")
        assert made.answer_prefix.endswith(f", {asked},")


def test_a_space_between_parts_is_in_front_of_the_second():
    parts = (Part("one "), Part("two ", True), Part("three"))
    made = dataclasses.replace(sample("order"), parts=parts)
    prompt = prompt_of(made, TOKENIZER)
    ((start, stop),) = prompt.spans
    assert TOKENIZER.decode(prompt.context[start:stop]) == " two"
    assert TOKENIZER.decode(prompt.context).endswith("one two three")
    assert TOKENIZER.decode(prompt.clean).endswith("one three")
    last = dataclasses.replace(sample("order"), parts=parts[:2])
    assert TOKENIZER.decode(prompt_of(last, TOKENIZER).context).endswith("one two ")


def test_conflicts_stand_on_both_sides_near_and_far():
    seen = set()
    for seed in range(24):
        made = sample("needle-conflict", seed)
        at = made.context.index(f"is: {made.answer}")
        wrong = made.context.index(f"is: {made.distractor}")
        assert (wrong < at) == made.metadata["span_first"]
        share = abs(wrong - at) / len(made.context)
        assert (share < 0.2) if made.metadata["near"] else (share > 0.1)
        seen.add((made.metadata["near"], made.metadata["span_first"]))
    assert len(seen) == 4


@pytest.mark.parametrize("suite", ["needle-conflict", "unrelated"])
def test_several_spans(suite):
    made = sample(suite, spans=3, length=700)
    spans = [part.text for part in made.parts if part.erased]
    assert len(spans) == 3
    assert len(set(re.findall(r"is: (\d+)", " ".join(spans)))) == 3


@pytest.mark.parametrize("suite", ONE_SPAN)
def test_other_suites_have_one(suite):
    with pytest.raises(ValueError, match=f"spans=2: suite '{suite}' has one"):
        sample(suite, spans=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suite": "poem"}, "suite 'poem': allowed are needle-conflict"),
        ({"suite": "chain", "span_tokens": 5}, "span_tokens=5: too short"),
        ({"suite": "chain", "length": 60}, "length=60: too short"),
        ({"suite": "tool", "length": 150}, "length=150: too short"),
        ({"suite": "neighbour", "length": 110}, "length=110: too short"),
        ({"suite": "unrelated", "spans": 0}, "spans=0"),
    ],
)
def test_what_cannot_be_made_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sample(**options)


def letters(text):
    """What every tokenizer keeps."""
    return re.sub(r"[^A-Za-z0-9]", "", text)


@pytest.mark.parametrize("suite", SUITES)
def test_the_clean_prompt_is_the_prompt_without_its_spans(suite):
    made = sample(suite)
    prompt = prompt_of(made, TOKENIZER)
    (start, stop), *_ = prompt.spans
    span = next(part.text for part in made.parts if part.erased)
    assert letters(TOKENIZER.decode(prompt.context[start:stop])) == letters(span)
    assert letters(made.context) in letters(TOKENIZER.decode(prompt.context))
    assert prompt.clean == prompt.context[:start] + prompt.context[stop:]
    assert letters(made.clean) in letters(TOKENIZER.decode(prompt.clean))
    assert letters(TOKENIZER.decode(prompt.answer)) == letters(made.answer)


def test_answers_are_compared_as_squad_does():
    made = sample("definition")
    assert normalised("The  Lighthouse, of a\nKeld!") == "lighthouse of keld"
    assert exact_match(made, f" the {made.answer.upper()}. And more") == 1.0
    assert exact_match(made, f"not {made.answer}") == 0.0
    assert distractor_hit(made, f"I think {made.distractor}.") == 1.0
    assert distractor_hit(made, f"I think {made.distractor}ish.") == 0.0
    assert distractor_hit(sample("neighbour"), "anything") == 0.0


def test_parts_make_the_context():
    made = sample("tool")
    assert "".join(part.text for part in made.parts) == made.context
    assert all(isinstance(part, Part) and part.text for part in made.parts)
