"""LongBench: official prompts and scores, from JSONL and parquet."""

from __future__ import annotations

import hashlib
import json

import pytest

from eval.tasks import TASKS, longbench
from eval.tasks.base import Absent
from tests.eval.tasks import written

TASK = TASKS["longbench"]
DIGEST = "e0b7e5942a5663be6e7f8754cd65a7819b8b59343967201235200a2404ecc2e9"


def row(**changed):
    return {
        "input": "Who came?",
        "context": "It rained.\n\nAnna came.",
        "answers": ["Anna"],
        "length": 3,
        "dataset": "qasper",
        "language": "en",
        "all_classes": None,
        "_id": "a1",
    } | changed


def load(tmp_path, subset, *rows):
    written.jsonl(tmp_path / f"{subset}.jsonl", list(rows))
    return TASK.load(tmp_path, subset)


def test_prompts_are_those_of_the_official_file():
    # dataset2prompt.json: 4979 characters, 21 prompts in this order.
    text = json.dumps(longbench._PROMPTS, indent=4, ensure_ascii=False)
    assert len(text) == 4979 and hashlib.sha256(text.encode()).hexdigest() == DIGEST


@pytest.mark.parametrize("subset", longbench._PROMPTS)
def test_context_and_question_are_the_official_prompt(tmp_path, subset):
    given = row(context="First line.\nLast line.\n", input="Asked?", all_classes=["Anna"])
    if subset.startswith("passage_retrieval"):
        given["answers"] = ["Paragraph 3"]
    (sample,) = load(tmp_path, subset, given)
    official = longbench._PROMPTS[subset].format(context=given["context"], input=given["input"])
    assert written.whole(sample) == official
    assert sample.context.endswith(("Last line.", "Last line.\n"))
    assert "Asked?" not in sample.context
    assert ("Asked?" in sample.question) == ("{input}" in longbench._PROMPTS[subset])
    assert sample.task == f"longbench/{subset}" and sample.id == f"longbench/{subset}/a1"


def test_a_prompt_by_hand(tmp_path):
    (sample,) = load(tmp_path, "triviaqa", row())
    assert sample.context == (
        "Answer the question based on the given passage. Only give me the answer and do not output "
        "any other words. The following are some examples.\n\nIt rained.\n\nAnna came."
    )
    assert sample.question == "\nWho came?"
    assert not sample.chat and sample.max_new_tokens == 32 and sample.answers == ("Anna",)


def test_lengths_of_replies_and_chat_are_official(tmp_path):
    lengths = {
        s: load(tmp_path, s, row(all_classes=["x"], answers=["Paragraph 3"]))[0]
        for s in longbench._PROMPTS
    }
    assert {s for s, sample in lengths.items() if not sample.chat} == {
        "trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p",
    }  # fmt: skip
    assert {s: sample.max_new_tokens for s, sample in lengths.items()} == {
        "narrativeqa": 128, "qasper": 128, "multifieldqa_en": 64, "multifieldqa_zh": 64,
        "hotpotqa": 32, "2wikimqa": 32, "musique": 32, "dureader": 128, "gov_report": 512,
        "qmsum": 512, "multi_news": 512, "vcsum": 512, "trec": 64, "triviaqa": 32, "samsum": 128,
        "lsht": 64, "passage_count": 32, "passage_retrieval_en": 32, "passage_retrieval_zh": 32,
        "lcc": 64, "repobench-p": 64,
    }  # fmt: skip


def test_files_of_longbench_e_are_read_with_the_same_prompts(tmp_path):
    (sample,) = load(tmp_path, "qasper_e", row())
    assert sample.task == "longbench/qasper_e" and TASK.score(sample, "anna!") == 1
    assert len(TASK.subsets) == 21 + 13


def test_parquet_gives_the_same_samples(tmp_path):
    rows = [row(_id=f"a{i}", context=f"文 {i}\n") for i in range(3)]
    parquet = written.parquet(tmp_path / "hotpotqa.parquet", rows)
    from_parquet = TASK.load(parquet, "hotpotqa")
    assert from_parquet == load(tmp_path / "other", "hotpotqa", *rows)
    assert [s.id for s in from_parquet] == [f"longbench/hotpotqa/a{i}" for i in range(3)]


@pytest.mark.parametrize(
    ("subset", "answers", "reply", "score"),
    [
        ("qasper", ["The red fox", "a dog"], "red", 2 / 3),
        ("multifieldqa_zh", ["北京"], "北京。", 1),
        ("triviaqa", ["Anna"], "\n\nAnna\nBerta", 1),
        ("hotpotqa", ["Anna"], "\n\nAnna\nBerta", 2 / 3),
        ("gov_report", ["a b c", "x"], "a b c", 1),
        ("samsum", ["Anna came."], "Anna came.\nDialogue: more", 1),
        ("vcsum", ["北京 会议"], "北京 会议", 1),
        ("dureader", ["北京"], "上海", 0),
        ("trec", ["Food"], "Food\nCity", 1),
        ("lsht", ["City"], "Food, City", 1 / 2),
        ("passage_count", ["12"], "12 or 13", 1 / 2),
        ("passage_retrieval_en", ["Paragraph 12"], "Paragraph 12", 1),
        ("passage_retrieval_zh", ["段落12"], "段落2", 0),
        ("lcc", ["return x"], "\nreturn x\ny", 1),
        ("repobench-p", ["ab"], "# skipped\nac", 0.5),
    ],
)
def test_scores_are_official(tmp_path, subset, answers, reply, score):
    (sample,) = load(tmp_path, subset, row(answers=answers, all_classes=["Food", "City"]))
    assert TASK.score(sample, reply) == pytest.approx(score, abs=1e-6)


@pytest.mark.parametrize(
    ("subset", "changed", "message"),
    [
        ("qasper", {"answers": 5}, r"qasper\.jsonl line 2: field 'answers' is 5; .* list of texts"),
        ("qasper", {"answers": []}, "line 2: field 'answers' is .*; allowed: a list of at least"),
        ("qasper", {"context": None}, "line 2: field 'context' is None; allowed: text"),
        ("trec", {"all_classes": None}, "line 2: field 'all_classes' is None; allowed: a list"),
        ("passage_retrieval_en", {"answers": ["3"]}, "line 2: field 'answers' .* paragraph's num"),
        ("qasper", {"_id": "a0"}, "sample longbench/qasper/a0: occurs twice"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_refused(tmp_path, subset, changed, message):
    right = row(_id="a0", all_classes=["x"], answers=["Paragraph 1"])
    with pytest.raises(ValueError, match=message):
        load(tmp_path, subset, right, right | {"_id": "a1"} | changed)


def test_missing_files_and_unknown_subsets(tmp_path):
    with pytest.raises(Absent, match=r"has none of qasper\.jsonl"):
        TASK.load(tmp_path, "qasper")
    with pytest.raises(ValueError, match="task longbench: subset 'nq'; allowed: narrativeqa"):
        TASK.load(tmp_path, "nq")
