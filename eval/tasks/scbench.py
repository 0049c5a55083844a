"""SCBench: several queries on one long context, which they share.

Li et al., SCBench (arXiv 2412.10319); github.com/microsoft/MInference (scbench/eval_utils.py,
compute_scores.py, repo_qa_utils.py). The files are those of the hub data set microsoft/SCBench,
`scbench_kv.jsonl` or `scbench_kv/test-*.parquet` and so on: a context and `multi_turns`, each with
input, answer and, where the task needs them, options, task and name.

Samples are those of the official multi-request mode ("same context, different queries",
`create_scdq_prompt`): each query is asked of the bare context, without the earlier queries and
their answers. All samples of a context follow one another with that context unchanged, so that
they share a prefill.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from eval.metrics.choice import chose
from eval.metrics.code import function_found
from eval.metrics.f1 import f1_chinese_characters
from eval.metrics.numerals import first_digits, first_number_is
from eval.metrics.rouge import rouge_lsum
from eval.tasks import documents, files
from eval.tasks.base import Sample, Task, string_match

_JSON = (
    "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}"
)
_CONTEXTS = {
    "scbench_kv": _JSON,
    "scbench_kv_hard": _JSON,
    "scbench_kv_compressible": (
        "Extract the value corresponding to the specified key in the following passage.\n\n"
        "{context}"
    ),
    "scbench_prefix_suffix": "{context}",
    "scbench_hashhop": "{context}",
    "scbench_vt": "{context}",
    "scbench_passkey": (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
        "it. I will quiz you about the important information.\n\n{context}"
    ),
    "scbench_repoqa": (
        "Based on the function description and code context, please retrieve and repeat the exact "
        "described function from the code context in a code block wrapped by ```:\n\n{context}"
    ),
    "scbench_qa_eng": (
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}"
    ),
    "scbench_qa_chn": "阅读以下书籍然后回答问题。\n\n{context}",
    "scbench_choice_eng": "Read the book and answer the question.\n\n{context}",
    "scbench_many_shot": "{context}",
    "scbench_mf": "{first_input}\n\n{context}",
    "scbench_summary": "{context}",
    "scbench_summary_with_needles": "{context}",
    "scbench_repoqa_and_kv": "{context}",
}
_QUERIES = {
    "scbench_qa_eng": "Question: {input}\nAnswer:",
    "scbench_qa_chn": "问题：{input}\n答案：",
    "scbench_choice_eng": (
        "Question: {input}\nA. {A}\nB. {B}\nC. {C}\nD. {D}\n\nThe the correct answer is"
    ),
    "scbench_mf": "{prefix}\n\n{input}",
}  # the others: {input}
_REPLY_TOKENS = {
    "scbench_choice_eng": 40,
    "scbench_qa_eng": 40,
    "scbench_qa_chn": 40,
    "scbench_mf": 5,
    "scbench_passkey": 15,
    "scbench_repoqa": 1024,
    "scbench_summary": 200,
    "scbench_vt": 30,
    "scbench_many_shot": 10,
}  # the others: 150
_MIXED = {
    "scbench_summary_with_needles": {"scbench_summary": 800, "scbench_passkey": 15},
    "scbench_repoqa_and_kv": {"scbench_repoqa": 1024, "scbench_kv": 80},
}  # sets of two tasks: each turn names its own
_CONTAINED = ("scbench_qa_eng", "scbench_many_shot")  # metrics that ignore case
SUBSETS = tuple(_CONTEXTS)


def load(path: Path, subset: str) -> list[Sample]:
    """Every query of an SCBench file, or of the file `subset` of a directory.

    The official code puts nothing between context and query; here a line break stands there.
    `metadata` holds the numbers of the context and of the turn within it.
    """
    documents.check_subset("scbench", subset, SUBSETS)
    samples: list[Sample] = []
    functions: dict[str, dict[str, str]] = defaultdict(dict)
    for row in files.rows(path, [subset]):
        turns = row.rows("multi_turns")
        if not turns:
            raise row.refused("multi_turns", "a list of at least one object")
        # Once for all turns, so that they share the very same text.
        context = _context(row, turns[0], subset)
        for turn in turns:
            task = _task(turn, subset)
            metadata: dict[str, Any] = {
                "task": task,
                "context_number": row.number,
                "turn": turn.number,
            }
            if task == "scbench_repoqa":
                # Filled as the file is read; all samples of a repository see the same functions.
                found = functions[row.text("repo")]
                found[turn.text("name")] = turn.text("answer")
                metadata |= {"name": turn.text("name"), "functions": found}
                metadata |= {"repo": row.text("repo"), "language": row.text("lang", "")}
            samples.append(
                documents.sample(
                    task="scbench",
                    subset=subset,
                    key=f"{row.number}/{turn.number}",
                    context=context,
                    question=_query(turn, subset),
                    answers=_answers(turn, subset),
                    max_new_tokens=_MIXED.get(subset, {}).get(task, _REPLY_TOKENS.get(task, 150)),
                    metadata=metadata,
                )
            )
    return samples


def score(sample: Sample, answer: str) -> float:
    """The official metric of the turn's task.

    Keys and values, prefixes and suffixes: the answer occurs in the reply; qa_eng and many_shot:
    so it does, case ignored; vt: the share of the variables that occur, in hundredths; passkey:
    the first number; mf: the value of the first number; qa_chn: F1 of characters; choice;
    rougeLsum for summaries; RepoQA's best match at a likeness of 0.8 for functions.

    Deviations: the official qa_chn and many_shot compare with every single character of the answer
    instead of the whole, and give nearly any reply of many_shot full marks; here the whole answer
    counts. Functions: see `eval.metrics.code.function_found`.
    """
    task = sample.metadata["task"]
    first = sample.answers[0]
    if task in _CONTAINED:
        return float(any(a.upper() in answer.upper() for a in sample.answers))
    match task:
        case "scbench_passkey":
            return float(first_digits(answer) == first)
        case "scbench_mf":
            return first_number_is(answer, first)
        case "scbench_vt":
            return round(string_match(sample, answer), 2)
        case "scbench_qa_chn":
            return f1_chinese_characters(answer, sample.answers)
        case "scbench_choice_eng":
            return chose(answer, sample.answers)
        case "scbench_summary":
            return rouge_lsum(answer, sample.answers)
        case "scbench_repoqa":
            metadata = sample.metadata
            return function_found(answer, metadata["name"], metadata["functions"])
    return float(first in answer)


def _context(row: files.Row, turn: files.Row, subset: str) -> str:
    # `mf` is a list of numbers, which the official prompt shows as Python does.
    numbers = subset == "scbench_mf" and isinstance(row.values.get("context"), list)
    field = "context" if "context" in row.values or "input" not in row.values else "input"
    text = str(list(row.integers("context"))) if numbers else row.text(field)
    first_input = turn.text("input")
    context = _CONTEXTS[subset].format(context=text, first_input=first_input)
    return documents.cut(context, "")[0]


def _query(turn: files.Row, subset: str) -> str:
    fields = {"input": turn.text("input")}
    if subset == "scbench_choice_eng":
        options = turn.texts("options")
        if len(options) != 4:
            raise turn.refused("options", "a list of 4 texts")
        fields |= dict(zip("ABCD", options, strict=True))
    if subset == "scbench_mf":
        asked = re.search("The .+ is", fields["input"])
        if asked is None:
            raise turn.refused("input", 'text like "The largest number of the list is:"')
        fields["prefix"] = f"What is {asked[0].lower().removesuffix(' is')}?"
    return _QUERIES.get(subset, "{input}").format(**fields)


def _answers(turn: files.Row, subset: str) -> tuple[str, ...]:
    answers = turn.answers("answer")
    if subset == "scbench_choice_eng":
        options = turn.texts("options")
        if answers[0] not in options:
            raise turn.refused("answer", "one of the options")
        return (answers[0], "ABCD"[options.index(answers[0])])
    if subset == "scbench_mf":
        try:
            float(answers[0])
        except ValueError:
            raise turn.refused("answer", "a number") from None
    return answers


def _task(turn: files.Row, subset: str) -> str:
    if subset not in _MIXED:
        return subset
    if turn.values.get("task") not in _MIXED[subset]:
        raise turn.refused("task", " or ".join(_MIXED[subset]))
    return turn.text("task")


TASK = Task(
    name="scbench",
    summary="SCBench: several queries on one shared context",
    load=load,
    source=lambda path, subset: files.source(path, [subset]),
    score=score,
    subsets=SUBSETS,
    haystacks=lambda subset: (),
)
