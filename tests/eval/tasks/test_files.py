"""Files of data sets: found, read, and refused with the field of the line that is wrong."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest

from eval.tasks import files
from eval.tasks.base import Absent
from tests.eval.tasks import written

ROWS = [
    {"text": "One\nline", "number": 1, "texts": ["a", "b"], "inner": [{"text": "x"}]},
    {"text": "二", "number": 2, "texts": [], "inner": []},
]


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: written.jsonl(folder / "set.jsonl", ROWS),
        lambda folder: written.jsonl(folder / "data" / "set.jsonl", ROWS),
        lambda folder: written.array(folder / "set.json", ROWS),
        lambda folder: written.parquet(folder / "set.parquet", ROWS),
        lambda folder: written.parquet(folder / "set" / "test-00000-of-00001.parquet", ROWS),
        lambda folder: written.parquet(folder / "data" / "set-00000-of-00001.parquet", ROWS),
    ],
)
def test_every_format_and_place_gives_the_same_rows(tmp_path, write):
    file = write(tmp_path)
    for path in (file, tmp_path):
        rows = list(files.rows(path, ["other", "set"]))
        assert [row.values for row in rows] == ROWS
        assert [row.number for row in rows] == [1, 2]
        assert rows[0].texts("texts") == ("a", "b")
        assert rows[0].rows("inner")[0].text("text") == "x"


def test_parts_are_read_in_order_and_the_test_split_alone(tmp_path):
    for split in ("train", "test"):
        for i in range(2):
            file = tmp_path / "set" / f"{split}-{i:05}-of-00002.parquet"
            written.parquet(file, [{"text": f"{split}{i}"}])
    assert [row.text("text") for row in files.rows(tmp_path, ["set"])] == ["test0", "test1"]


def test_rows_are_numbered_on_over_the_parts(tmp_path):
    for i in range(3):
        written.parquet(tmp_path / f"set-{i:05}-of-00003.parquet", [{"text": "a"}, {"text": "b"}])
    rows = list(files.rows(tmp_path, ["set"]))
    assert [row.number for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[5].place == "set-00002-of-00003.parquet row 2"


def test_a_path_may_begin_with_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    written.jsonl(tmp_path / "data" / "set.jsonl", ROWS)
    assert len(list(files.rows(Path("~/data"), ["set"]))) == 2
    assert len(list(files.rows(Path("~/data/set.jsonl"), []))) == 2


def test_the_first_name_that_is_there_is_read(tmp_path):
    written.jsonl(tmp_path / "b.jsonl", [{"text": "b"}])
    written.jsonl(tmp_path / "data" / "a.jsonl", [{"text": "a"}])
    assert files.found(tmp_path, ["a", "b"]) == [tmp_path / "b.jsonl"]


def test_a_missing_file_is_absent(tmp_path):
    with pytest.raises(Absent, match=r"has none of set\.jsonl, set\.json, set\.parquet"):
        list(files.rows(tmp_path, ["set"]))
    with pytest.raises(Absent, match="no such file or directory"):
        list(files.rows(tmp_path / "none", ["set"]))


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("text", 5, "field 'f' is 5; allowed: text"),
        ("text", None, "field 'f' is None; allowed: text"),
        ("texts", "a", "field 'f' is 'a'; allowed: a list of texts"),
        ("texts", ["a", 1], "field 'f' is ['a', 1]; allowed: a list of texts"),
        ("integer", "1", "field 'f' is '1'; allowed: a whole number"),
        ("integer", True, "field 'f' is True; allowed: a whole number"),
        ("integers", [1.5], "field 'f' is [1.5]; allowed: a list of whole numbers"),
        ("answers", [], "field 'f' is []; allowed: text, a number, or a list of at least one"),
        ("answers", None, "field 'f' is None; allowed: text, a number, or a list of at least one"),
        ("rows", [1], "field 'f' is [1]; allowed: a list of objects"),
        ("text", list(range(99)), "0, 1, 2, 3"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(tmp_path, method, value, message):
    path = written.jsonl(tmp_path / "set.jsonl", [{"f": "right"}, {"f": value}])
    row = list(files.rows(path, []))[1]
    with pytest.raises(ValueError) as refused:
        getattr(row, method)("f")
    assert str(refused.value).startswith("set.jsonl line 2: field 'f' is ")
    assert message in str(refused.value) and len(str(refused.value)) < 180


def test_a_missing_field_is_named(tmp_path):
    path = written.jsonl(tmp_path / "set.jsonl", [{"a": [{"b": 1}]}])
    (row,) = files.rows(path, [])
    with pytest.raises(ValueError, match=r"line 1: field 'f' is missing; allowed: text"):
        row.text("f")
    with pytest.raises(ValueError, match=r"line 1: field 'a\[0\]\.b' is 1; allowed: text"):
        row.rows("a")[0].text("b")
    assert row.text("f", "default") == "default"


def test_answers_are_texts_whatever_they_come_as(tmp_path):
    path = written.jsonl(tmp_path / "set.jsonl", [{"a": "x", "b": 3, "c": ["x", 2.5]}])
    (row,) = files.rows(path, [])
    assert [row.answers(f) for f in "abc"] == [("x",), ("3",), ("x", "2.5")]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("set.jsonl", '{"a": 1}\n{"a": \n', r"set\.jsonl line 2: is not JSON"),
        ("set.jsonl", '{"a": 1}\n\n{"a": 1}\n', r"set\.jsonl line 2: is empty"),
        ("set.jsonl", '{"a": 1}\n5\n', r"set\.jsonl line 2: is a int; allowed: an object"),
        ("set.json", '[{"a": 1}, 5]', r"set\.json entry 2: is a int; allowed: an object"),
        ("set.json", '[{"a": 1}', r"set\.json: is not JSON"),
        ("set.jsonl", "", "holds no samples"),
        ("set.json", "[]", "holds no samples"),
        ("set.parquet", "text", r"set\.parquet: is not parquet"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        list(files.rows(tmp_path / name, []))


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    path = written.parquet(tmp_path / "set.parquet", [{"a": 1}])
    real = builtins.__import__

    def blocked(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(ImportError, match=r"reading parquet needs pyarrow: .*kvjax\[eval\]"):
        list(files.rows(path, []))


def test_a_hub_data_set_is_downloaded(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    written.jsonl(tmp_path / "data" / "set.jsonl", ROWS)
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert [row.values for row in files.rows(Path("hub:org/name"), ["set"])] == ROWS
    assert asked["name"] == "org/name" and asked["repo_type"] == "dataset"
    assert "*/set.*" in asked["allow_patterns"]


def test_a_hub_out_of_reach_is_one_line(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def download(name, **options):
        raise OSError("no route to host\nwith much detail")

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(Absent) as absent:
        list(files.rows(Path("hub:org/name"), ["set"]))
    assert str(absent.value) == (
        "hub:org/name: not downloaded (OSError: no route to host); give a local file"
    )
