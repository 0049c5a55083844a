"""Files become documents: blocks joined up to a size, whole files, rows."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.eval.tasks import written
from tests.train.data.tokens import StableTokenizer, StartingTokenizer
from train.data.config import TextConfig
from train.data.text import TextSource


def texts(*paths, **options):
    config = TextConfig(text=tuple(map(str, paths)), **options)
    source = TextSource(config, StableTokenizer())
    return [source.text(i) for i in range(len(source))]


BOOK = "One.\nTwo.\n\nThree.\n \t\n\n\nFour four four four.\n\n\nFive."


def test_blocks_are_joined_up_to_a_number_of_characters(tmp_path):
    (tmp_path / "book.txt").write_text(BOOK)
    blocks = ["One.\nTwo.", "Three.", "Four four four four.", "Five."]
    assert texts(tmp_path, characters=1) == blocks
    assert texts(tmp_path, characters=16) == blocks
    assert texts(tmp_path, characters=17) == ["One.\nTwo.\n\nThree.", *blocks[2:]]
    assert texts(tmp_path, characters=len(BOOK)) == [BOOK]
    assert texts(tmp_path, documents="files") == [BOOK]


@settings(deadline=None)
@given(
    blocks=st.lists(st.text("aé \n漢", min_size=1).filter(str.strip), min_size=1, max_size=8),
    characters=st.integers(1, 30),
)
def test_no_character_of_a_block_is_lost_and_no_document_is_needlessly_long(
    tmp_path_factory, blocks, characters
):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    content = "\n\n".join(blocks)
    path.write_text(content, encoding="utf-8")
    documents = texts(path, characters=characters)
    assert "".join("".join(documents).split()) == "".join(content.split())
    assert all(
        len(d) <= characters or len(re.split(r"\n(?:[ \t\r]*\n)+", d)) == 1 for d in documents
    )
    whole = texts(path, documents="files")
    assert whole == [content]


def test_files_of_directories_and_globs_come_once_and_in_order(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.md", "deep/not.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a.txt", "b.txt", "deep/c.md"]
    assert texts(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert texts(tmp_path / "**" / "*.md") == ["deep/c.md"]
    assert texts(tmp_path / "b.txt", tmp_path) == ["b.txt", "a.txt", "deep/c.md"]
    assert texts(tmp_path / "deep" / "not.bin") == ["deep/not.bin"]


def test_rows_of_every_kind_are_documents(tmp_path):
    rows = [{"body": "First row."}, {"body": " "}, {"body": "Second\n\nrow."}]
    for path in (
        written.jsonl(tmp_path / "a.jsonl", rows),
        written.array(tmp_path / "b.json", rows),
        written.parquet(tmp_path / "c.parquet", rows),
    ):
        assert texts(path, field="body") == ["First row.", "Second\n\nrow."]


def test_every_token_is_predicted_with_what_goes_around_plain_text(tmp_path):
    (tmp_path / "a.txt").write_text("Some words.")
    tokenizer = StartingTokenizer()
    source = TextSource(TextConfig(text=(str(tmp_path),)), tokenizer)
    assert tokenizer.decode(source[0]["tokens"]) == "<|start|>Some words."
    assert source[0]["targets"].all()


def test_identity_follows_the_content_and_not_its_place(tmp_path):
    def identity(folder, content):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "a.txt").write_text(content)
        config = TextConfig(text=(str(tmp_path / folder),))
        return TextSource(config, StableTokenizer()).identity

    assert identity("here", "A b.") == identity("there", "A b.")
    assert identity("here", "A b.") != identity("here", "A b c.")
    assert identity("here", "A b.") != identity("here", "A c.")


def test_unreadable_text_is_refused_in_one_line(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "blank.txt").write_text(" \n\n ")
    (tmp_path / "empty").mkdir()
    row = written.jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"body": "b"}])
    for path, message in (
        (tmp_path / "bad.txt", "bad.txt: not UTF-8 text; a UTF-8 text file is needed"),
        (tmp_path / "blank.txt", "blank.txt: holds no text"),
        (tmp_path / "none.txt", "none.txt: no such file or directory, and no file matches it"),
        (tmp_path / "empty", "empty: has no file that ends in .txt, .md, .jsonl, .json, .parquet"),
        (row, "a.jsonl line 2: field 'text' is missing; allowed: text"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            texts(path)
        assert "\n" not in str(caught.value)
