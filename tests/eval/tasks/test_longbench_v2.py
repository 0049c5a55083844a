"""LongBench v2: the official zero-shot prompt and its letters."""

from __future__ import annotations

import pytest

from eval.tasks import TASKS
from tests.eval.tasks import written

TASK = TASKS["longbench-v2"]
ROW = {
    "_id": "66f",
    "domain": "Single-Document QA",
    "sub_domain": "Academic",
    "difficulty": "easy",
    "length": "short",
    "question": " Who came? ",
    "choice_A": "Anna",
    "choice_B": "Berta ",
    "choice_C": "Carl",
    "choice_D": "Dora",
    "answer": "B",
    "context": "\nIt rained. {really}\n",
}


def test_prompt_is_official(tmp_path):
    (sample,) = TASK.load(written.array(tmp_path / "data.json", [ROW]), "")
    assert sample.context == (
        "Please read the following text and answer the question below.\n\n<text>\n"
        "It rained. {really}"
    )
    assert sample.question == (
        "</text>\n\nWhat is the correct answer to this question: Who came?\nChoices:\n(A) Anna\n"
        "(B) Berta\n(C) Carl\n(D) Dora\n\nFormat your response as follows: "
        '"The correct answer is (insert answer here)".'
    )
    assert sample.id == "longbench-v2/66f" and sample.max_new_tokens == 128 and sample.chat
    assert sample.metadata["difficulty"] == "easy"


def test_formats_agree(tmp_path):
    samples = TASK.load(written.array(tmp_path / "a" / "data.json", [ROW]).parent, "")
    assert TASK.load(written.jsonl(tmp_path / "data.jsonl", [ROW]), "") == samples
    assert TASK.load(written.parquet(tmp_path / "data.parquet", [ROW]), "") == samples


def test_score(tmp_path):
    (sample,) = TASK.load(written.array(tmp_path / "data.json", [ROW]), "")
    assert TASK.score(sample, "The correct answer is (B) Berta.") == 1
    assert TASK.score(sample, "The correct answer is **A**.") == 0
    assert TASK.score(sample, "B") == 0


def test_an_answer_has_to_be_a_letter(tmp_path):
    path = written.array(tmp_path / "data.json", [ROW, ROW | {"answer": "E"}])
    with pytest.raises(ValueError, match=r"data\.json entry 2: field 'answer' is 'E'; allowed: A"):
        TASK.load(path, "")
