"""The description of the data says what is wrong with it in one line."""

from __future__ import annotations

import pytest
import yaml

from train import data

GOOD = """
- task: ruler
  subsets: [niah_single_2, vt]
  haystacks: [sentences, prose]
  lengths: [256, 512]
  weight: 2
- task: needle
  haystack: file:book.txt
  length: 300
  keys: 4
  depths: [0, 0.1]
  labels: all
- text: data/books/*.txt
  weight: 1
- text: [a.txt, b.jsonl]
  field: body
  documents: files
  characters: 100
  long: drop
- chat: data/chat.jsonl
"""


def test_a_good_description_is_read_with_its_defaults():
    ruler, needle, books, rows, chat = sources = data.read("data", yaml.safe_load(GOOD))
    assert ruler == data.TaskConfig(
        task="ruler",
        subsets=("niah_single_2", "vt"),
        haystacks=("sentences", "prose"),
        lengths=(256, 512),
        weight=2.0,
    )
    assert (needle.haystacks, needle.lengths, needle.keys) == (("file:book.txt",), (300, 300), 4)
    assert (needle.depths, ruler.depths) == ((0.0, 0.1), (0.0, 1.0))
    assert (needle.labels, ruler.labels, chat.labels) == ("all", "answers", "answers")
    assert books == data.TextConfig(text=("data/books/*.txt",))
    assert (books.documents, books.characters, books.long) == ("blocks", 20_000, "cut")
    assert (rows.text, rows.field, rows.long) == (("a.txt", "b.jsonl"), "body", "drop")
    assert chat == data.ChatConfig(chat=("data/chat.jsonl",), field="messages")
    assert data.read("data", [data.mapping(source) for source in sources]) == sources


TASK = {"task": "needle", "lengths": [100, 200]}
BAD = [
    ({}, r"data=\{\}: allowed: a list with at least one entry"),
    ([], r"data=\[\]: allowed: a list"),
    (
        ["a.txt"],
        r"data\[0\]='a.txt': allowed: a mapping with one of the keys text, chat, task, erase",
    ),
    ([{"weight": 1}], r"data\[0\]: has the keys weight; exactly one of text, chat, task, erase"),
    ([{}], r"data\[0\]: has the keys none; exactly one"),
    ([{"text": "a", "chat": "b"}], r"data\[0\]: has the keys text, chat; exactly one"),
    ([{"text": "a", "wieght": 1}], r"unknown key 'wieght' in data\[0\].*did you mean 'weight'"),
    ([{"text": ""}], r"data\[0\].text\[0\]='': allowed: a text that is not empty"),
    ([{"text": 3}], r"data\[0\].text=3: allowed: a list"),
    ([{"text": ["a", "a"]}], r"data\[0\].text: 'a' is given twice"),
    ([{"text": "a", "documents": "lines"}], "documents='lines': allowed: blocks, files"),
    ([{"text": "a", "characters": 0}], "characters=0: allowed: integers >= 1"),
    ([{"text": "a", "long": "cuts"}], "long='cuts': allowed: cut, drop; did you mean 'cut'"),
    ([{"text": "a", "weight": 0}], "weight=0: allowed: numbers > 0"),
    ([{"text": "a", "weight": True}], "weight=True: allowed: numbers > 0"),
    ([{"text": "a", "weight": float("inf")}], "weight=inf: allowed: numbers > 0"),
    ([{"chat": "a", "labels": "none"}], "labels='none': allowed: answers, all"),
    ([{"chat": "a", "field": ""}], "field='': allowed: a text"),
    ([{"task": "needl", "lengths": 3}], "task='needl': allowed: needle, ruler; did you mean"),
    ([{"task": "longbench", "lengths": 3}], "task='longbench': allowed: needle, ruler"),
    ([{"task": "needle"}], r"missing key 'lengths' in data\[0\]"),
    ([TASK | {"lengths": [200, 100]}], r"lengths=\[200, 100\]: allowed: .* \[from, to\]"),
    ([TASK | {"lengths": [1, 2, 3]}], r"lengths=\[1, 2, 3\]: allowed"),
    ([TASK | {"lengths": [0, 2]}], r"lengths=\[0, 2\]: allowed"),
    ([TASK | {"lengths": True}], r"lengths=True: allowed|lengths=\[True"),
    ([TASK | {"lengths": 2.5}], r"lengths=2.5: allowed"),
    ([TASK | {"length": 3}], "key 'lengths' in data.0. is given twice"),
    ([TASK | {"subsets": ["vt"]}], r"data\[0\].subsets: task needle does not take it"),
    ([TASK | {"haystacks": ["nois"]}], r"haystacks\[0\]='nois': .*did you mean 'noise'"),
    ([TASK | {"keys": 0}], "keys=0: allowed: integers >= 1"),
    ([TASK | {"keys": 41}], "keys=41: allowed: integers from 1 to 40"),
    ([TASK | {"depths": [0.5, 1.5]}], r"depths=\[0.5, 1.5\]: allowed: a share of the context"),
    ([TASK | {"depths": [0.5, 0.1]}], r"depths=\[0.5, 0.1\]: allowed"),
    ([TASK | {"depths": "early"}], r"depths='early': allowed"),
    ([TASK | {"depths": [[0], 1]}], r"depths=\[\[0\], 1\]: allowed"),
    ([TASK | {"task": "ruler", "depths": 0}], r"data\[0\].depths: task ruler does not take it"),
    ([TASK | {"path": "a"}], r"data\[0\].path: task needle does not take it"),
    ([TASK | {"task": "ruler", "keys": 2}], r"data\[0\].keys: task ruler does not take it"),
    ([TASK | {"task": "ruler", "subsets": "vtt"}], r"subsets\[0\]='vtt'.*did you mean 'vt'"),
    ([TASK | {"task": "ruler", "subsets": "qa_1"}], r"missing key 'path' in data\[0\]: qa_1 needs"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_bad_descriptions_are_refused_in_one_line(content, message):
    with pytest.raises(ValueError, match=message) as caught:
        data.read("data", content)
    assert "\n" not in str(caught.value)
