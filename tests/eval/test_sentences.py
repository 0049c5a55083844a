"""Made-up sentences: many, different, the same in every process."""

from __future__ import annotations

import random
import re

from eval import haystacks, sentences


def test_no_sentence_is_repeated_in_twenty_thousand():
    found = haystacks.load("sentences").sentences
    assert len(found) >= 20_000
    assert len({sentence.strip() for sentence in found}) == len(found)


def test_every_sentence_reads_as_one():
    for sentence in haystacks.load("sentences").sentences:
        assert re.fullmatch(r"[A-Z][A-Za-z ,;]+\.[ \n]", sentence)
        assert 4 <= len(sentence.split()) <= 25
        assert not re.search(r"\bthe (the|something|nothing|many|alive|ashamed)\b", sentence)
        assert not re.search(r"\b([A-Z][a-z]+) n?or \1\b", sentence)


def test_words_and_templates_vary():
    text = "".join(haystacks.load("sentences").sentences)
    assert len(set(text.lower().split())) > 6_000


def test_the_same_sentences_are_made_again():
    assert sentences.sentences() == haystacks.load("sentences").sentences


def test_a_needle_may_follow_any_sentence_and_a_seed_starts_elsewhere():
    haystack = haystacks.load("sentences")
    assert not haystack.breaks_at_lines and "wonderwords" in haystack.source
    assert next(haystack.stream(random.Random(1))) != next(haystack.stream(random.Random(2)))
