"""SCBench: queries that share a context, and their official scores."""

from __future__ import annotations

import pytest

from eval.tasks import TASKS
from tests.eval.tasks import written

TASK = TASKS["scbench"]
KV = {
    "id": 0,
    "context": '{"a": "1", "b": "2"}\n',
    "multi_turns": [{"input": "Key: a", "answer": "1x"}, {"input": "Key: b", "answer": "2y"}],
}


def turns(*pairs, **fields):
    return [{"input": i, "answer": a} | fields for i, a in pairs]


def load(tmp_path, subset, *rows):
    return TASK.load(written.jsonl(tmp_path / f"{subset}.jsonl", list(rows)), subset)


def test_samples_of_one_context_follow_one_another_with_the_same_text(tmp_path):
    samples = load(tmp_path, "scbench_kv", KV, KV | {"id": 1, "context": "{}"})
    assert [s.id for s in samples] == [
        f"scbench/scbench_kv/{i}/{j}" for i in (1, 2) for j in (1, 2)
    ]
    contexts = [s.context for s in samples]
    assert contexts[0] is contexts[1] and contexts[2] is contexts[3]
    assert contexts[0] != contexts[2]
    assert [s.question for s in samples] == ["Key: a", "Key: b"] * 2
    assert [s.metadata["turn"] for s in samples] == [1, 2, 1, 2]


def test_prompt_is_that_of_the_multi_request_mode(tmp_path):
    sample = load(tmp_path, "scbench_kv", KV)[1]
    assert written.whole(sample) == (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n"
        '{"a": "1", "b": "2"}\nKey: b'
    )


def test_question_templates(tmp_path):
    given = {"context": "A book.", "multi_turns": turns(("Who?", "Berta"))}
    (sample,) = load(tmp_path, "scbench_qa_eng", given)
    assert sample.context == (
        "Read the book and answer the question. Be very concise in your answer.\n\nA book."
    )
    assert sample.question == "Question: Who?\nAnswer:"
    (sample,) = load(tmp_path, "scbench_qa_chn", given)
    assert sample.question == "问题：Who?\n答案："
    options = ["Anna", "Berta", "Carl", "Dora"]
    given["multi_turns"] = turns(("Who?", "Berta"), options=options)
    (sample,) = load(tmp_path, "scbench_choice_eng", given)
    assert sample.question == (
        "Question: Who?\nA. Anna\nB. Berta\nC. Carl\nD. Dora\n\nThe the correct answer is"
    )
    assert sample.answers == ("Berta", "B")


def test_many_numbers(tmp_path):
    asked = "The largest number of the list is:"
    given = {"context": [3, 14, 5], "multi_turns": turns((asked, 14), ("The median is:", 5))}
    first, second = load(tmp_path, "scbench_mf", given)
    assert first.context is second.context
    assert first.context == f"{asked}\n\n[3, 14, 5]"
    # The official pattern runs to the last "is" of the line.
    assert first.question == f"What is the largest number of the list?\n\n{asked}"
    assert second.question == "What is the median?\n\nThe median is:"
    assert TASK.score(first, "14") == 1 and TASK.score(first, "5") == 0


@pytest.mark.parametrize(
    ("subset", "answer", "reply", "score"),
    [
        ("scbench_kv", "ab-12", "It is ab-12.", 1),
        ("scbench_kv", "ab-12", "It is AB-12.", 0),
        ("scbench_prefix_suffix", "xyz", "xyz", 1),
        ("scbench_vt", ["AAA", "BBB", "CCC"], "aaa BBB", 0.67),
        ("scbench_passkey", "123", "key 123, 4", 1),
        ("scbench_passkey", ["123"], "1234", 0),
        ("scbench_qa_eng", "Berta", "it was BERTA", 1),
        ("scbench_qa_eng", "Berta", "e", 0),
        ("scbench_qa_chn", "北京市", "北京", 0.8),
        ("scbench_many_shot", "(A)", "(A)", 1),
        ("scbench_many_shot", "(A)", "(B)", 0),
        ("scbench_summary", "Anna came", "anna came", 1),
    ],
)
def test_scores(tmp_path, subset, answer, reply, score):
    given = {"context": "Text.", "multi_turns": turns(("Ask.", answer))}
    (sample,) = load(tmp_path, subset, given)
    assert TASK.score(sample, reply) == pytest.approx(score)


FUNCTIONS = {
    "add": "def add(a, b):\n    total = a + b\n    return total",
    "sub": "def sub(a, b):\n    total = a - b\n    return total",
}


def repository(name="org/repo", **fields):
    found = [
        {"input": f"About {n}", "answer": text, "name": n} | fields for n, text in FUNCTIONS.items()
    ]
    return {"context": "code", "repo": name, "lang": "python", "multi_turns": found}


def test_functions_are_compared_with_all_of_their_repository(tmp_path):
    one, other = repository(), repository("org/other")
    other["multi_turns"] = other["multi_turns"][:1]
    samples = load(tmp_path, "scbench_repoqa", one, other)
    assert len(samples) == 3 and samples[0].max_new_tokens == 1024
    assert dict(samples[0].metadata["functions"]) == FUNCTIONS
    assert list(samples[2].metadata["functions"]) == ["add"]
    assert TASK.score(samples[0], f"```python\n{FUNCTIONS['add']}\n```") == 1
    assert TASK.score(samples[1], f"```python\n{FUNCTIONS['add']}\n```") == 0


def test_mixed_sets_take_metric_and_length_from_the_turn(tmp_path):
    given = {
        "context": "Text.",
        "multi_turns": [
            {"input": "Sum up.", "answer": "Anna came", "task": "scbench_summary"},
            {"input": "Key?", "answer": "12", "task": "scbench_passkey"},
        ],
    }
    summary, key = load(tmp_path, "scbench_summary_with_needles", given)
    assert (summary.max_new_tokens, key.max_new_tokens) == (800, 15)
    assert TASK.score(summary, "anna came") == TASK.score(key, "12") == 1
    given = repository(task="scbench_repoqa")
    given["multi_turns"].append({"input": "Key", "answer": "v", "task": "scbench_kv"})
    add, _, value = load(tmp_path, "scbench_repoqa_and_kv", given)
    assert (add.max_new_tokens, value.max_new_tokens) == (1024, 80)
    assert TASK.score(add, FUNCTIONS["add"]) == TASK.score(value, "v") == 1


def test_parquet_gives_the_same_samples(tmp_path):
    folder = written.parquet(tmp_path / "scbench_kv" / "test-00000-of-00001.parquet", [KV]).parent
    assert TASK.load(folder.parent, "scbench_kv") == load(tmp_path / "x", "scbench_kv", KV)


@pytest.mark.parametrize(
    ("subset", "changed", "message"),
    [
        ("scbench_kv", {"multi_turns": []}, "field 'multi_turns' is .*; allowed: a list of at"),
        ("scbench_kv", {"multi_turns": turns(("q", "a"), (5, "a"))},
         r"field 'multi_turns\[1\]\.input' is 5; allowed: text"),
        ("scbench_kv", {"context": 5}, "field 'context' is 5; allowed: text"),
        ("scbench_mf", {"context": ["x"]}, "field 'context' is .*; allowed: a list of whole"),
        ("scbench_choice_eng", {}, r"field 'multi_turns\[0\]\.options' is missing"),
        ("scbench_repoqa", {}, "field 'repo' is missing"),
        ("scbench_repoqa_and_kv", {}, r"field 'multi_turns\[0\]\.task' is missing"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused(tmp_path, subset, changed, message):
    with pytest.raises(ValueError, match=rf"{subset}\.jsonl line 1: {message}"):
        load(tmp_path, subset, KV | changed)
