"""InfiniteBench: 12 tasks on texts of 40,000 to 2,000,000 tokens.

Zhang et al., InfiniteBench (arXiv 2402.13718); github.com/OpenBMB/InfiniteBench (src/prompt.py,
src/eval_utils.py, src/compute_scores.py). The files are those of the hub data set
xinrongzhang2022/InfiniteBench: `passkey.jsonl` and so on, with the fields context, input, answer
and options.

Prompts are the official `yarn_mistral_templates`, those for open models, and replies have the
official lengths, which are short: 3 to 6 tokens where one number or letter is asked for.
"""

from __future__ import annotations

import re
from pathlib import Path

from eval.metrics.choice import chose, chose_function
from eval.metrics.f1 import f1, f1_chinese_characters
from eval.metrics.numerals import first_digits, first_number_is, leading_numbers
from eval.metrics.rouge import rouge_lsum
from eval.tasks import documents, files
from eval.tasks.base import Sample, Task

_OPTIONS = "A. {A}\nB. {B}\nC. {C}\nD. {D}"
_PROMPTS = {
    "passkey": (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
        "it. I will quiz you about the important information.\n\n{context}\n\n{input}\n\n"
        "The pass key is"
    ),
    "number_string": (
        "There is an important info hidden inside a lot of irrelevant text. Find it. I will quiz "
        "you about the important information there.\n\n{context}\n\n{input}\n\n"
        "The sequence of digits is"
    ),
    "kv_retrieval": (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n"
        "{context}\n\n{input}"
    ),
    "longdialogue_qa_eng": (
        "Below is a dialogue script where one random occurrence of a character name is replaced "
        'with "$$MASK$$", and you should try to guess who that character is.\n\n{context}\n\n'
        "The name that has been replaced with $$MASK$$ is likely"
    ),
    "longbook_sum_eng": "Summarize the book below.\n\n{context}\n\nSummary:",
    "longbook_choice_eng": (
        f"Read the book and answer the question.\n\n{{context}}\n\nQuestion: {{input}}\n{_OPTIONS}"
        "\n\nThe letter of the correct answer is"
    ),
    "longbook_qa_eng": (
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\n"
        "Question: {input}\nAnswer:"
    ),
    "longbook_qa_chn": "阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{input}\n答案：",
    "math_find": "{prefix}\n\n{context}\n\n{input}",
    "math_calc": (
        "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\n"
        "Values: [1, 4, 8]\n\nExpression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\n"
        "Expression: {context}\nValues:"
    ),
    "code_run": (
        "There is a function called {func} in the following Python code.\n\n{context}\n\nPlease "
        "compute the exact value of {func_call}. The value of {func_call} is"
    ),
    "code_debug": (
        "Following is a Python code where exactly one of the functions/methods has a deliberate "
        f"error that makes it crash.\n\n{{context}}\n\nOptions:\n{_OPTIONS}\n\n"
        "The correct option is:"
    ),
}
_REPLY_TOKENS = {
    "passkey": 6,
    "number_string": 12,
    "kv_retrieval": 50,
    "longbook_sum_eng": 1200,
    "math_find": 3,
    "math_calc": 30000,
    "code_run": 5,
    "code_debug": 5,
}  # the others: 40
_CHOICES = ("longbook_choice_eng", "code_debug")
_WORD_BREAKS = str.maketrans(dict.fromkeys("\n:\"'.,?!{}", " "))
SUBSETS = tuple(_PROMPTS)


def load(path: Path, subset: str) -> list[Sample]:
    """Every sample of an InfiniteBench file, or of the file `subset`.jsonl of a directory.

    Context, line break and question are the official prompt to the character.
    """
    documents.check_subset("infinitebench", subset, SUBSETS)
    samples = []
    for row in files.rows(path, [subset]):
        context, question = documents.prompt_parts(
            _PROMPTS[subset], "context", context=row.text("context"), **_fields(row, subset)
        )
        samples.append(
            documents.sample(
                task="infinitebench",
                subset=subset,
                key=row.number,
                context=context,
                question=question,
                answers=_answers(row, subset),
                max_new_tokens=_REPLY_TOKENS.get(subset, 40),
                metadata={"id": row.values["id"]} if "id" in row.values else None,
            )
        )
    return samples


def score(sample: Sample, answer: str) -> float:
    """The official metric of the sample's task.

    Accuracy for retrieval, choice, code_run and math_find, the share of leading values for
    math_calc, F1 of words (English) and characters (Chinese), and rougeLsum for summaries.
    longdialogue_qa_eng looks for the name among the reply's words, so that a name of two words is
    never found: so it is in the official scorer.
    """
    subset = sample.task.removeprefix("infinitebench/")
    first = sample.answers[0]
    match subset:
        case "passkey" | "number_string":
            return float(first_digits(answer) == first)
        case "kv_retrieval":
            return float(first in answer.translate(_WORD_BREAKS).split())
        case "longdialogue_qa_eng":
            return float(first in answer.translate(_WORD_BREAKS).upper().split())
        case "longbook_choice_eng":
            return chose(answer, sample.answers)
        case "code_debug":
            return chose_function(answer, *sample.answers)
        case "longbook_qa_eng":
            return f1(answer, sample.answers)
        case "longbook_qa_chn":
            return f1_chinese_characters(answer, sample.answers)
        case "longbook_sum_eng":
            return rouge_lsum(answer, sample.answers)
        case "math_find":
            return first_number_is(answer, first)
        case "math_calc":
            return leading_numbers(answer, sample.answers)
    return _last_word_is(answer, int(first))  # code_run


def _fields(row: files.Row, subset: str) -> dict[str, str]:
    """What the prompt needs besides the context."""
    if subset in ("longbook_sum_eng", "longdialogue_qa_eng", "math_calc"):
        return {}
    if subset == "code_run":
        call = re.search(r"func_[0-9]+\(-?[0-9]+\)", row.text("input"))
        if call is None:
            raise row.refused("input", "text with a call like func_12(-3)")
        return {"func": call[0].split("(")[0], "func_call": call[0]}
    fields = {} if subset == "code_debug" else {"input": row.text("input")}
    if subset == "math_find":
        asked = re.search("The .+ of", row.text("input"))
        if asked is None:
            raise row.refused("input", 'text like "The largest number of the list is:"')
        wanted = asked[0].lower().removesuffix(" of")
        fields["prefix"] = f"What is {wanted} in the following list?"
    if subset in _CHOICES:
        options = row.texts("options")
        if len(options) != 4:
            raise row.refused("options", "a list of 4 texts")
        fields |= dict(zip("ABCD", options, strict=True))
    return fields


def _answers(row: files.Row, subset: str) -> tuple[str, ...]:
    if subset in _CHOICES:
        answers, options = row.answers("answer"), row.texts("options")
        if answers[0] not in options or answers[1:] not in ((), *((x,) for x in "ABCD")):
            raise row.refused("answer", "one of the options, and its letter or nothing")
        return (answers[0], "ABCD"[options.index(answers[0])])
    if subset == "math_calc" and _nested(row.values.get("answer")):
        values = row.values["answer"][0]
        return files.Row(row.place, row.number, {"answer": values}).answers("answer")
    answers = row.answers("answer")
    if subset in ("math_find", "math_calc", "code_run"):
        for number in answers:
            try:
                float(number) if subset == "math_find" else int(number)
            except ValueError:
                raise row.refused("answer", "a number, or a list of numbers") from None
    return answers


def _nested(value: object) -> bool:
    return isinstance(value, list) and len(value) == 1 and isinstance(value[0], list)


def _last_word_is(reply: str, number: int) -> float:
    words = reply.translate(str.maketrans(dict.fromkeys("\n.`'\":", " "))).split()
    try:
        return float(bool(words) and int(words[-1]) == number)
    except ValueError:
        return 0.0


TASK = Task(
    name="infinitebench",
    summary="InfiniteBench: retrieval, books, dialogue, mathematics and code over 100,000 tokens",
    load=load,
    source=lambda path, subset: files.source(path, [subset]),
    score=score,
    subsets=SUBSETS,
    haystacks=lambda subset: (),
)
