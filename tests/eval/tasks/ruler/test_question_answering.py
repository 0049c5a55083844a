"""Questions about documents: the gold ones once, the others from where RULER takes them."""

from __future__ import annotations

import json
import re

import pytest

from eval.tasks.base import Absent


def documents(sample) -> list[str]:
    parts = re.split(r"Document (\d+):\n", sample.context)
    assert parts[1::2] == [str(i) for i in range(1, len(parts) // 2 + 1)]
    return [part.strip() for part in parts[2::2]]


def changed(path, tmp_path, change):
    content = json.loads(path.read_text())
    change(content)
    new = tmp_path / "changed.json"
    new.write_text(json.dumps(content))
    return new


@pytest.mark.parametrize("length", [1024, 4096])
def test_the_paragraph_of_the_question_is_there_once(make, question_files, length):
    articles = json.loads(question_files["qa_1"].read_text())["data"]
    paragraphs = [p for article in articles for p in article["paragraphs"]]
    for seed in range(8):
        sample = make("qa_1", length, seed)
        gold, asked = paragraphs[seed]["context"], paragraphs[seed]["qas"][0]
        assert sample.question.endswith(f"\n\nQuestion: {asked['question']}")
        assert sample.answers == (f"Answer 0-{seed}", f"answer 0-{seed}")
        assert sample.context.count(gold) == 1
        start, end = sample.metadata["needle_span"]
        assert sample.context[start:end] == gold
        found = documents(sample)
        assert len(found) == len(set(found)) == sample.metadata["documents"]
        # All but the one that was cut are whole paragraphs, of the same article before others.
        whole = [d for d in found if any(d == p["context"] for p in paragraphs)]
        assert len(whole) >= len(found) - 1
        own = {p["context"] for p in articles[0]["paragraphs"]}
        assert own <= set(whole) or set(whole) <= own


@pytest.mark.parametrize("length", [512, 1024, 4096])
def test_the_paragraphs_that_support_the_answer_are_there_once(make, question_files, length):
    questions = json.loads(question_files["qa_2"].read_text())
    for seed in range(8):
        sample = make("qa_2", length, seed)
        assert sample.answers == (f"Answer {seed}",)
        paragraphs = {t: f"{t}\n{''.join(s)}" for t, s in questions[seed]["context"]}
        gold = [paragraphs[f"Title {seed}-{j}"] for j in (3, 7)]
        assert [sample.context.count(text) for text in gold] == [1, 1]
        spans = sample.metadata["needle_spans"]
        assert sorted(sample.context[a:b] for a, b in spans) == sorted(gold)
        near = sum(text in sample.context for text in paragraphs.values())
        assert near == 10 or sample.metadata["documents"] - near <= 1


def test_the_gold_paragraph_is_anywhere_among_the_documents(make):
    samples = [make("qa_1", seed=seed) for seed in range(12)]
    places = {s.context[: s.metadata["needle_span"][0]].count("Document ") for s in samples}
    assert len(places) > 3


def test_questions_that_cannot_be_answered_are_left_out_and_seeds_start_over(make):
    first, again = make("qa_1", seed=1), make("qa_1", seed=161)
    assert first.answers == again.answers and first.context != again.context


def test_squad_one_has_no_mark_for_impossible_questions(make, question_files, tmp_path):
    def change(content):
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                del paragraph["qas"][1]

    path = changed(question_files["qa_1"], tmp_path, change)
    assert make("qa_1", path=path).context == make("qa_1").context


def test_a_directory_is_searched_for_a_file_of_the_right_kind(make, question_files, tmp_path):
    directory = question_files["qa_1"].parent
    assert make("qa_1", path=directory) == make("qa_1")
    assert make("qa_2", path=directory) == make("qa_2")
    with pytest.raises(Absent, match=r"ruler/qa_1: directory '.*' has no \*.json file with SQuAD"):
        make("qa_1", path=tmp_path)


@pytest.mark.parametrize("subset", ["qa_1", "qa_2"])
def test_a_missing_file_is_absent_with_the_reason_in_one_line(
    make, subset, question_files, tmp_path
):
    name = {"qa_1": "SQuAD", "qa_2": "HotpotQA"}[subset]
    with pytest.raises(
        Absent, match=rf"^ruler/{subset}: path '.*none.json' does not exist; .*{name}"
    ):
        make(subset, path=tmp_path / "none.json")
    saved = question_files.pop(subset)
    try:
        with pytest.raises(
            Absent, match=rf"^ruler/{subset} needs a file of questions: .*{name}.*$"
        ):
            make(subset)
    finally:
        question_files[subset] = saved


@pytest.mark.parametrize(
    ("subset", "content", "complaint"),
    [
        ("qa_1", "[1, 2", "line 1: not JSON"),
        ("qa_1", "[]", "file: 'data' is missing"),
        ("qa_1", '{"data": []}', "no question with an answer"),
        ("qa_1", '{"data": [{"paragraphs": [{}]}]}', r"data\[0\].paragraphs\[0\]: 'context'"),
        (
            "qa_1",
            '{"data": [{"paragraphs": [{"context": "a", "qas": [{"answers": [{"text": 3}]}]}]}]}',
            r"data\[0\].paragraphs\[0\].qas\[0\].answers\[0\].text: int where str is needed",
        ),
        ("qa_2", '{"data": []}', "file: dict where a list is needed"),
        ("qa_2", '[{"question": "a"}]', r"\[0\]: 'answer' is missing"),
        (
            "qa_2",
            '[{"question": "a", "answer": "b", "context": [["t"]], "supporting_facts": []}]',
            r"\[0\].context\[0\]: a list of a title and one more",
        ),
        (
            "qa_2",
            '[{"question": "a", "answer": "b", "context": [["t", ["s"]]], "supporting_facts": []}]',
            r"\[0\].supporting_facts: titles that are in context",
        ),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(make, tmp_path, subset, content, complaint):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"^file of questions '.*bad.json'.*{complaint}") as error:
        make(subset, path=path)
    assert "; allowed: " in str(error.value) and "\n" not in str(error.value)
    assert not isinstance(error.value, Absent)


def test_a_length_beyond_the_documents_of_the_file_is_refused(make):
    with pytest.raises(ValueError, match=r"^length=999999: too long .* 'squad.json', .* <= \d+$"):
        make("qa_1", 999_999)
