"""Haystacks: prose that reads as prose, files that are there, names that are known."""

from __future__ import annotations

import random

import pytest

from eval import haystacks


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


def test_docstrings_read_as_prose_and_share_no_sentence_with_it():
    docstrings, prose = haystacks.load("docstrings"), haystacks.load("prose")
    text = "".join(docstrings.sentences)
    assert len(text) > 200_000
    assert not any(mark in text for mark in (">>>", ":func:", ":class:", "`", "==="))
    assert not set(docstrings.sentences) & set(prose.sentences)
    assert "numpy 2." in docstrings.source and "jax 0." in docstrings.source


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
    with pytest.raises(
        ValueError, match="'hay': allowed are noise, sentences, prose, docstrings and file:PATH"
    ):
        haystacks.load("hay")
