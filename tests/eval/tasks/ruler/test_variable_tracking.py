"""Variable tracking, against an interpreter of the assignments."""

from __future__ import annotations

import itertools
import re

import pytest


def interpret(text: str) -> dict[str, str]:
    """The value of every variable, running the assignments of `text` from the top."""
    values: dict[str, str] = {}
    for name, copied, other in re.findall(r"VAR ([A-Z]+) = (VAR )?(\w+)", text):
        values[name] = values[other] if copied else other
    return values


@pytest.mark.parametrize("haystack", ["noise", "sentences", "prose"])
@pytest.mark.parametrize("length", [1024, 4096])
def test_exactly_the_answers_have_the_value_asked_for(make, haystack, length):
    for seed in range(4):
        sample = make("vt", length, seed, haystack=haystack)
        values = interpret(sample.context)
        value = re.search(r"\d{5}", sample.question)[0]
        assert [name for name, v in values.items() if v == value] == list(sample.answers)
        assert len(values) == 10 and len(sample.answers) == 5
        assert all(len(name) == 5 for name in sample.answers)


def test_the_example_is_solved_and_of_five_hundred_tokens(make, count_tokens):
    for length in (1024, 2048):
        sample = make("vt", length, count=count_tokens)
        example, rest = sample.context.split("\n\nMemorize and track", 1)
        value = re.search(r"assigned the value (\d+) in the text above\.", example)[1]
        names = re.search(r", they are:  (.*)$", example)[1].split()
        assert [name for name, v in interpret(example).items() if v == value] == names
        assert len(names) == 5 and all(len(name) == 3 for name in names)
        assert 470 <= count_tokens(example, "", "") - count_tokens("", "", "") <= 500
        assert list(interpret(rest)) == list(sample.answers)


def test_assignments_are_lines_in_noise_and_sentences_in_prose(make):
    noise, prose = make("vt", 2048), make("vt", 2048, haystack="prose")
    for start, end in noise.metadata["needle_spans"]:
        assert noise.context[start:end] in noise.context.split("\n")
    for start, end in prose.metadata["needle_spans"]:
        assert prose.context[start:end].endswith(".")


def test_in_noise_there_is_noise_between_two_assignments(make):
    for seed in range(5):
        sample = make("vt", 2048, seed)
        spans = sample.metadata["needle_spans"]
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert "There and back again." in sample.context[end:start]


def test_prefix_is_that_of_ruler(make):
    sample = make("vt")
    assert sample.answer_prefix == (
        "Answer: According to the chain(s) of variable assignment in the text above, 5 variables "
        f"are assigned the value {sample.metadata['value']}, they are: "
    )


def test_a_file_with_assignments_in_it_is_refused(make, tmp_path):
    path = tmp_path / "code.txt"
    path.write_text("This is VAR ABC = 5. It is code.\n")
    with pytest.raises(ValueError, match=r"^haystack file:code.txt: contains 'VAR '"):
        make("vt", haystack=f"file:{path}")
