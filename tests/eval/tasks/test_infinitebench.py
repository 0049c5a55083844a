"""InfiniteBench: official prompts, lengths and scores."""

from __future__ import annotations

import pytest

from eval.tasks import TASKS
from tests.eval.tasks import written

TASK = TASKS["infinitebench"]
CONTEXT = "Much text.\nMore {text}."
OPTIONS = ["f", "g", "h", "parse"]
# subset: input, answer, official prompt around the context, a right reply, a wrong one
CASES = {
    "passkey": (
        "What is the pass key?", ["71432"],
        ("There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
         "it. I will quiz you about the important information.\n\n",
         "\n\nWhat is the pass key?\n\nThe pass key is"),
        " 71432.", "7143",
    ),
    "number_string": (
        "What is the sequence?", ["2200012222"],
        ("There is an important info hidden inside a lot of irrelevant text. Find it. I will quiz "
         "you about the important information there.\n\n",
         "\n\nWhat is the sequence?\n\nThe sequence of digits is"),
        "2200012222", "220001222",
    ),
    "kv_retrieval": (
        'Key: "a-b"\nThe value is: ', ["c-d"],
        ("Extract the value corresponding to the specified key in the JSON object below.\n\n",
         '\n\nKey: "a-b"\nThe value is: '),
        '{"a-b": "c-d"}', "c-dd",
    ),
    "longdialogue_qa_eng": (
        "Who?", ["MARTA"],
        ("Below is a dialogue script where one random occurrence of a character name is replaced "
         'with "$$MASK$$", and you should try to guess who that character is.\n\n',
         "\n\nThe name that has been replaced with $$MASK$$ is likely"),
        "Marta!", "Martha",
    ),
    "longbook_sum_eng": (
        "", ["Anna came.\nIt rained."],
        ("Summarize the book below.\n\n", "\n\nSummary:"),
        "anna came\nit rained", "nothing",
    ),
    "longbook_choice_eng": (
        "Who came?", ["g"],
        ("Read the book and answer the question.\n\n",
         "\n\nQuestion: Who came?\nA. f\nB. g\nC. h\nD. parse\n\n"
         "The letter of the correct answer is"),
        " B. g", "The answer is C",
    ),
    "longbook_qa_eng": (
        "Who came?", ["Anna", "Ann"],
        ("Read the book and answer the question. Be very concise in your answer.\n\n",
         "\n\nQuestion: Who came?\nAnswer:"),
        "the Ann", "Berta",
    ),
    "longbook_qa_chn": (
        "谁？", ["安娜"],
        ("阅读以下书籍然后回答问题。\n\n", "\n\n问题：谁？\n答案："),
        "安娜。", "她",
    ),
    "math_find": (
        "You should answer with only one number, no other words. The second largest number of the "
        "list is: ", [45],
        ("What is the second largest number in the following list?\n\n",
         "\n\nYou should answer with only one number, no other words. The second largest number of "
         "the list is: "),
        "45", "-44",
    ),
    "math_calc": (
        "", [[1, 4, 8]],
        ("Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\n"
         "Values: [1, 4, 8]\n\nExpression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: ",
         "\nValues:"),
        "[1, 4, 8]", "[2, 4, 8]",
    ),
    "code_run": (
        "Please give me the exact number of the return value of func_12(-3). Be concise.", [7],
        ("There is a function called func_12 in the following Python code.\n\n",
         "\n\nPlease compute the exact value of func_12(-3). The value of func_12(-3) is"),
        "it is 7.", "7 or 8",
    ),
    "code_debug": (
        "Which?", ["parse"],
        ("Following is a Python code where exactly one of the functions/methods has a deliberate "
         "error that makes it crash.\n\n",
         "\n\nOptions:\nA. f\nB. g\nC. h\nD. parse\n\nThe correct option is:"),
        "D. parse", "A. f",
    ),
}  # fmt: skip


def row(subset, **changed):
    asked, answer, *_ = CASES[subset]
    return {
        "id": 7,
        "context": CONTEXT,
        "input": asked,
        "answer": answer,
        "options": OPTIONS,
    } | changed


def test_every_subset_has_a_case():
    assert tuple(CASES) == TASK.subsets


@pytest.mark.parametrize("subset", CASES)
def test_prompt_is_official(tmp_path, subset):
    written.jsonl(tmp_path / f"{subset}.jsonl", [row(subset)])
    (sample,) = TASK.load(tmp_path, subset)
    before, after = CASES[subset][2]
    assert written.whole(sample) == before + CONTEXT + after
    assert sample.context == before + CONTEXT
    assert sample.id == f"infinitebench/{subset}/1" and sample.metadata == {"id": 7}


@pytest.mark.parametrize("subset", CASES)
def test_score_tells_right_from_wrong(tmp_path, subset):
    *_, right, wrong = CASES[subset]
    (sample,) = TASK.load(written.jsonl(tmp_path / "x.jsonl", [row(subset)]), subset)
    assert TASK.score(sample, right) == 1
    assert TASK.score(sample, wrong) == TASK.score(sample, "") == 0


def test_lengths_of_replies_are_official(tmp_path):
    lengths = {}
    for subset in CASES:
        path = written.jsonl(tmp_path / "x.jsonl", [row(subset)])
        lengths[subset] = TASK.load(path, subset)[0].max_new_tokens
    assert lengths == {
        "passkey": 6, "number_string": 12, "kv_retrieval": 50, "longbook_sum_eng": 1200,
        "longbook_choice_eng": 40, "longbook_qa_eng": 40, "longbook_qa_chn": 40,
        "longdialogue_qa_eng": 40, "math_find": 3, "math_calc": 30000, "code_run": 5,
        "code_debug": 5,
    }  # fmt: skip


def test_numbers_may_come_as_texts_as_in_parquet(tmp_path):
    for subset, texts in (
        ("math_calc", ["1", "4", "8"]),
        ("code_run", ["7"]),
        ("math_find", ["45"]),
    ):
        path = written.parquet(tmp_path / "x.parquet", [row(subset, answer=texts)])
        (sample,) = TASK.load(path, subset)
        (other,) = TASK.load(written.jsonl(tmp_path / "x.jsonl", [row(subset)]), subset)
        assert sample == other


def test_math_calc_counts_the_leading_values(tmp_path):
    (sample,) = TASK.load(written.jsonl(tmp_path / "x.jsonl", [row("math_calc")]), "math_calc")
    assert TASK.score(sample, "1, 4, 9") == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("subset", "changed", "message"),
    [
        ("code_run", {"input": "?"}, "field 'input' is '\\?'; allowed: text with a call"),
        ("code_run", {"answer": ["x"]}, "field 'answer' is .*; allowed: a number"),
        ("math_find", {"input": "?"}, "field 'input' is '\\?'; allowed: text like"),
        ("code_debug", {"options": ["f"]}, "field 'options' is .*; allowed: a list of 4 texts"),
        ("code_debug", {"answer": ["z"]}, "field 'answer' is .*; allowed: one of the options"),
        ("passkey", {"answer": None}, "field 'answer' is None"),
    ],
)
def test_a_wrong_field_is_refused(tmp_path, subset, changed, message):
    path = written.jsonl(tmp_path / "x.jsonl", [row(subset, **changed)])
    with pytest.raises(ValueError, match=f"x.jsonl line 1: {message}"):
        TASK.load(path, subset)
