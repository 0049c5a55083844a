"""LongMemEval: the history as officially written, and the rule that stands in for a judge."""

from __future__ import annotations

import copy

import pytest

from eval.tasks import TASKS
from eval.tasks.base import Absent
from tests.eval.tasks import written

TASK = TASKS["longmemeval"]
ROW = {
    "question_id": "q1",
    "question_type": "single-session-user",
    "question": "Where did I park?",
    "answer": "On the Green Street",
    "question_date": "2023/05/30 (Tue) 23:40",
    "haystack_session_ids": ["late", "early"],
    "haystack_dates": ["2023/05/21 (Sun) 04:00", "2023/05/20 (Sat) 02:21"],
    "haystack_sessions": [
        [{"role": "user", "content": "I parked on “Green” Street.", "has_answer": True}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
    ],
    "answer_session_ids": ["late"],
}


def load(tmp_path, *rows):
    return TASK.load(written.array(tmp_path / "longmemeval_s.json", list(rows)), "s")


def test_sessions_are_in_order_of_date_and_without_the_mark_of_evidence(tmp_path):
    (sample,) = load(tmp_path, ROW)
    assert written.whole(sample) == (
        "I will give you several history chats between you and a user. Please answer the question "
        "based on the relevant chat history.\n\n\nHistory Chats:\n\n"
        "\n### Session 1:\nSession Date: 2023/05/20 (Sat) 02:21\nSession Content:\n\n"
        '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]\n'
        "\n### Session 2:\nSession Date: 2023/05/21 (Sun) 04:00\nSession Content:\n\n"
        '[{"role": "user", "content": "I parked on \\u201cGreen\\u201d Street."}]\n'
        "\n\nCurrent Date: 2023/05/30 (Tue) 23:40\nQuestion: Where did I park?\nAnswer:"
    )
    assert sample.question.endswith("Where did I park?\nAnswer:")
    assert "park?" not in sample.context
    assert sample.id == "longmemeval/s/q1" and sample.max_new_tokens == 500


def test_a_directory_is_searched_for_the_released_files(tmp_path):
    written.array(tmp_path / "longmemeval_oracle.json", [ROW])
    written.array(tmp_path / "data" / "longmemeval_s_cleaned.json", [ROW])
    assert len(TASK.load(tmp_path, "oracle")) == len(TASK.load(tmp_path, "s")) == 1


def test_parquet_gives_the_same_samples(tmp_path):
    path = written.parquet(tmp_path / "longmemeval_s.parquet", [ROW])
    assert TASK.load(path, "s") == load(tmp_path, ROW)


def test_questions_whose_answers_are_rubrics_are_left_out_and_counted(tmp_path):
    rubric = {**ROW, "question_id": "q2", "question_type": "single-session-preference"}
    (sample,) = load(tmp_path, ROW, rubric, {**rubric, "question_id": "q3"})
    assert sample.id == "longmemeval/s/q1"
    assert sample.metadata["left_out"].startswith("2 questions of the type single-session-pref")
    with pytest.raises(Absent, match="all of its questions are of the type single-session-pref"):
        load(tmp_path, rubric)


@pytest.mark.parametrize(
    ("answer", "reply", "score"),
    [
        ("On the Green Street", "You parked on Green Street, I believe.", 1),
        ("On the Green Street", "On Evergreen Street", 0),
        ("On the Green Street", "", 0),
        (3, "You did it 3 times.", 1),
        (3, "You did it 13 times.", 0),
    ],
)
def test_a_reply_that_contains_the_answer_is_right(tmp_path, answer, reply, score):
    (sample,) = load(tmp_path, ROW | {"answer": answer})
    assert TASK.score(sample, reply) == score


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("You did not mention a bus.", 1),
        ("I don't have any information about this.", 1),
        ("It is not mentioned in the chats.", 1),
        ("On Green Street.", 0),
    ],
)
def test_an_abstention_question_wants_to_hear_that_nothing_is_known(tmp_path, reply, score):
    (sample,) = load(tmp_path, ROW | {"question_id": "q1_abs", "answer": "You did not mention it."})
    assert sample.metadata["abstention"] and TASK.score(sample, reply) == score


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(question=5), "field 'question' is 5; allowed: text"),
        (lambda r: r["haystack_dates"].pop(), "field 'haystack_sessions' is .* a list of 1 lists"),
        (
            lambda r: r["haystack_sessions"][1][0].update(content=5),
            r"field 'haystack_sessions\[1\]\[0\]\.content' is 5; allowed: text",
        ),
    ],
)
def test_a_wrong_field_is_refused(tmp_path, change, message):
    wrong = copy.deepcopy(ROW)
    change(wrong)
    with pytest.raises(ValueError, match=f"longmemeval_s.json entry 1: {message}"):
        load(tmp_path, wrong)
