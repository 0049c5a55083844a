r"""GSM8K, MATH-500 and AIME: short problems with long replies, to measure decoding.

Cobbe et al., GSM8K (arXiv 2110.14168), `test.jsonl` of the hub data set openai/gsm8k; Hendrycks et
al., MATH (arXiv 2103.03874), the 500 problems of Lightman et al. (arXiv 2305.20050), `test.jsonl`
of HuggingFaceH4/MATH-500; AIME, the problems of a year, `test.jsonl` or `train-*.parquet` of
math-ai/aime25, HuggingFaceH4/aime_2024 and others.

The context is the problem. None of the three has an official prompt for chat models; the question
is the usual one of reports on reasoning models (Qwen2.5-Math, DeepSeek-R1). Replies may have 4,096
(GSM8K), 16,384 (MATH-500) and 32,768 tokens (AIME), enough for models that think.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from eval.metrics.mathematics import final_answer, same_answer
from eval.tasks import documents, files
from eval.tasks.base import Sample, Task

_QUESTION = r"Please reason step by step, and put your final answer within \boxed{}."
_PROBLEM_FIELDS = ("problem", "Problem", "question", "Question")
_ANSWER_FIELDS = ("answer", "Answer")
_KEY_FIELDS = ("unique_id", "id", "ID", "problem_idx")
_INFORMATIVE = ("subject", "level", "year", "url")
AIME_YEARS = ("2024", "2025", "2026")


def score(sample: Sample, answer: str) -> float:
    """1 where the reply's final answer is the right one (`eval.metrics.mathematics`)."""
    return float(same_answer(final_answer(answer), sample.answers[0]))


def _loader(
    task: str,
    names: Callable[[str], list[str]],
    reply_tokens: int,
    subsets: tuple[str, ...] = ("",),
) -> Callable[[Path, str], list[Sample]]:
    def load(path: Path, subset: str = "") -> list[Sample]:
        """Every problem of a file, or of a file of a directory under one of its usual names."""
        documents.check_subset(task, subset, subsets)
        return documents.distinct(
            [
                documents.sample(
                    task=task,
                    subset=subset,
                    key=_key(row),
                    context=row.text(_present(row, _PROBLEM_FIELDS)).rstrip("\n"),
                    question=_QUESTION,
                    answers=(_answer(row, task),),
                    max_new_tokens=reply_tokens,
                    metadata={k: row.values[k] for k in _INFORMATIVE if k in row.values},
                )
                for row in files.rows(path, names(subset))
            ]
        )

    return load


def _present(row: files.Row, fields: tuple[str, ...]) -> str:
    return next((f for f in fields if f in row.values), fields[0])


def _key(row: files.Row) -> object:
    value = row.values.get(_present(row, _KEY_FIELDS))
    return value if isinstance(value, str | int) else row.number


def _answer(row: files.Row, task: str) -> str:
    field = _present(row, _ANSWER_FIELDS)
    answers = row.answers(field)
    if len(answers) != 1:
        raise row.refused(field, "text or a number")
    if task != "gsm8k":
        return answers[0]
    # The answer is worked out, and its last line is "#### 18".
    _, found, last = answers[0].rpartition("####")
    if not found or not last.strip():
        raise row.refused(field, "text that ends with #### and a number")
    return last.strip()


GSM8K = Task(
    name="gsm8k",
    summary="GSM8K: word problems of primary school",
    load=_loader("gsm8k", lambda _: ["gsm8k", "gsm8k_test", "test", "main/test"], 4096),
    score=score,
    haystacks=lambda subset: (),
)
MATH_500 = Task(
    name="math-500",
    summary="MATH-500: competition problems with answers in LaTeX",
    load=_loader("math-500", lambda _: ["math-500", "math_500", "math500", "test"], 16384),
    score=score,
    haystacks=lambda subset: (),
)


def _aime_names(year: str) -> list[str]:
    return [f"aime_{year}", f"aime{year}", f"aime{year[2:]}", "test", "train"]


AIME = Task(
    name="aime",
    summary="AIME: problems of the American Invitational Mathematics Examination of one year",
    load=_loader("aime", _aime_names, 32768, AIME_YEARS),
    source=lambda path, year: files.source(path, _aime_names(year)),
    score=score,
    subsets=AIME_YEARS,
    haystacks=lambda subset: (),
)
