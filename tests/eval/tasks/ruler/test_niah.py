"""Needles: as many as RULER's definition says, found again from the context alone."""

from __future__ import annotations

import re

import pytest

from eval.tasks.ruler import niah

NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.")
WORD, NUMBER = r"[a-z]+-[a-z]+", r"[1-9]\d{6}"
UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
# Subset: kinds of keys and values, needles in all (None: as many as fit), answers.
DEFINITIONS = {
    "niah_single_1": (WORD, NUMBER, 1, 1),
    "niah_single_2": (WORD, NUMBER, 1, 1),
    "niah_single_3": (WORD, UUID, 1, 1),
    "niah_multikey_1": (WORD, NUMBER, 4, 1),
    "niah_multikey_2": (WORD, NUMBER, None, 1),
    "niah_multikey_3": (UUID, UUID, None, 1),
    "niah_multivalue": (WORD, NUMBER, 4, 4),
    "niah_multiquery": (WORD, NUMBER, 4, 4),
}


@pytest.mark.parametrize("length", [512, 2048])
@pytest.mark.parametrize("subset", niah.SUBSETS)
def test_the_answers_are_what_the_needles_with_the_asked_keys_say(make, subset, length):
    key_kind, value_kind, total, number = DEFINITIONS[subset]
    for seed in range(5):
        sample = make(subset, length, seed)
        needles = NEEDLE.findall(sample.context)
        keys = [key for _, key, _ in needles]
        asked = [k for k in dict.fromkeys(keys) if re.search(rf"\b{k}\b", sample.question)]
        found = [value for _, key, value in needles if key in asked]
        assert sorted(found) == sorted(sample.answers) and len(found) == number
        assert all(sample.context.count(value) == 1 for value in found)
        assert all(re.fullmatch(key_kind, key) for key in keys)
        assert all(re.fullmatch(value_kind, value) for _, _, value in needles)
        assert len(needles) == (total or max(len(needles), length // 150))
        assert len(set(keys)) == (1 if subset == "niah_multivalue" else len(needles))
        assert not any(value in sample.question + sample.answer_prefix for value in found)


def test_several_answers_are_asked_for_in_the_plural(make):
    one, several = make("niah_single_3"), make("niah_multiquery")
    assert one.context.startswith("A special magic uuid is hidden within the following text. ")
    assert one.question.startswith("What is the special magic uuid for ")
    assert one.answer_prefix.endswith(" mentioned in the provided text is")
    assert several.context.startswith("Some special magic numbers are hidden within the following")
    keys = several.metadata["keys"]
    listed = f"{keys[0]}, {keys[1]}, {keys[2]}, and {keys[3]}"
    assert several.question == (
        f"What are all the special magic numbers for {listed} mentioned in the provided text?"
    )
    assert several.answer_prefix == (
        f"The special magic numbers for {listed} mentioned in the provided text are"
    )


@pytest.mark.parametrize("subset", niah.SUBSETS)
@pytest.mark.parametrize("depth", [0, 0.5, 1])
def test_the_first_needle_asked_for_stands_at_the_depth_given(make, subset, depth):
    sample = make(subset, 2048, depth=depth)
    start = sample.context.index(f"for {sample.metadata['keys'][0]} is: {sample.answers[0]}")
    assert start / len(sample.context) == pytest.approx(depth, abs=0.08)
    assert sample.depth == depth and f"/d{depth:g}/" in sample.id


@pytest.mark.parametrize("subset", niah.SUBSETS)
def test_without_a_depth_the_seed_spreads_needles_over_the_context(make, subset):
    samples = [make(subset, 512, seed) for seed in range(24)]
    places = [s.metadata["needle_span"][0] / len(s.context) for s in samples]
    assert min(places) < 0.3 and max(places) > (0.25 if len(samples[0].answers) > 1 else 0.7)
    assert len({round(place, 2) for place in places}) > 6


def test_needles_in_lines_have_lines_of_their_own(make):
    for subset in ("niah_single_1", "niah_multikey_2", "niah_multikey_3"):
        sample = make(subset)
        start, end = sample.metadata["needle_span"]
        assert sample.context[start:end] in sample.context.split("\n")


def test_a_file_with_a_value_in_it_is_refused(make, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("All is well in this book. It ends here.\n")
    value = make("niah_single_2", haystack=f"file:{path}").answers[0]
    path.write_text(f"All is well in {value} books. It ends here.\n")
    with pytest.raises(ValueError, match=r"^haystack file:book.txt: contains the key .* or one of"):
        make("niah_single_2", haystack=f"file:{path}")
