"""GSM8K, MATH-500 and AIME: problems in, final answers out."""

from __future__ import annotations

import pytest

from eval.tasks import TASKS
from tests.eval.tasks import written

GSM8K = {"question": "How many eggs?\n", "answer": "She sells 16 - 3 = 13.\n#### 1,013"}
MATH = {
    "problem": "Simplify.",
    "solution": r"It is $\boxed{\frac{1}{2}}$.",
    "answer": r"\frac{1}{2}",
    "subject": "Algebra",
    "level": 2,
    "unique_id": "test/algebra/1.json",
}
AIME = {"id": 60, "problem": "Find it.", "answer": 25, "year": "2024"}


def test_the_problem_is_the_context(tmp_path):
    (sample,) = TASKS["gsm8k"].load(written.jsonl(tmp_path / "test.jsonl", [GSM8K]), "")
    assert written.whole(sample) == (
        "How many eggs?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    assert sample.id == "gsm8k/1" and sample.task == "gsm8k" and sample.answers == ("1,013",)


@pytest.mark.parametrize(
    ("task", "row", "reply", "score"),
    [
        ("gsm8k", GSM8K, r"So \boxed{1013}.", 1),
        ("gsm8k", GSM8K, "16 - 3 is 1013", 1),
        ("gsm8k", GSM8K, "#### 13", 0),
        ("math-500", MATH, r"\boxed{0.5}", 1),
        ("math-500", MATH, r"\boxed{\dfrac12}", 1),
        ("math-500", MATH, r"\boxed{2}", 0),
        ("aime", AIME, r"<think>maybe \boxed{24}</think>\boxed{025}", 1),
        ("aime", AIME, "", 0),
    ],
)
def test_score(tmp_path, task, row, reply, score):
    (sample,) = TASKS[task].load(
        written.jsonl(tmp_path / "test.jsonl", [row]), "2024" if task == "aime" else ""
    )
    assert TASKS[task].score(sample, reply) == score


def test_directories_are_searched_for_the_usual_names(tmp_path):
    written.parquet(tmp_path / "g" / "main" / "test-00000-of-00001.parquet", [GSM8K])
    written.jsonl(tmp_path / "m" / "test.jsonl", [MATH])
    written.jsonl(tmp_path / "a" / "aime25.jsonl", [AIME])
    written.parquet(tmp_path / "a" / "data" / "train-00000-of-00001.parquet", [AIME])
    assert TASKS["gsm8k"].load(tmp_path / "g", "")[0].max_new_tokens == 4096
    (sample,) = TASKS["math-500"].load(tmp_path / "m", "")
    assert sample.id == "math-500/test/algebra/1.json" and sample.max_new_tokens == 16384
    assert sample.metadata == {"subject": "Algebra", "level": 2}
    for year in ("2024", "2025"):
        (sample,) = TASKS["aime"].load(tmp_path / "a", year)
        assert sample.id == f"aime/{year}/60" and sample.max_new_tokens == 32768


def test_fields_may_have_capital_letters(tmp_path):
    rows = [{"ID": "2024-I-1", "Problem": "Find it.", "Answer": 204}]
    (sample,) = TASKS["aime"].load(written.jsonl(tmp_path / "test.jsonl", rows), "2024")
    assert sample.id == "aime/2024/2024-I-1" and sample.answers == ("204",)


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("gsm8k", GSM8K | {"answer": "13"}, "field 'answer' is '13'; allowed: text that ends with"),
        ("math-500", MATH | {"answer": ["1", "2"]}, "field 'answer' is .*; allowed: text or a num"),
        ("math-500", {"answer": "1"}, "field 'problem' is missing; allowed: text"),
    ],
)
def test_a_wrong_field_is_refused(tmp_path, task, row, message):
    path = written.jsonl(tmp_path / "test.jsonl", [row])
    with pytest.raises(ValueError, match=f"test.jsonl line 1: {message}"):
        TASKS[task].load(path, "")
