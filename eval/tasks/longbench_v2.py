"""LongBench v2: 503 hard multiple-choice questions on texts of 8,000 to 2,000,000 words.

Bai et al., LongBench v2 (arXiv 2412.15204); github.com/THUDM/LongBench (pred.py,
prompts/0shot.txt). The file is `data.json` of the hub data set THUDM/LongBench-v2.
"""

from __future__ import annotations

from pathlib import Path

from eval.metrics.choice import stated_letter
from eval.tasks import documents, files
from eval.tasks.base import Sample, Task

_BEFORE = "Please read the following text and answer the question below.\n\n<text>\n{context}"
_AFTER = (
    "\n</text>\n\nWhat is the correct answer to this question: {question}\nChoices:\n(A) {A}\n"
    "(B) {B}\n(C) {C}\n(D) {D}\n\nFormat your response as follows: "
    '"The correct answer is (insert answer here)".'
)
_INFORMATIVE = ("domain", "sub_domain", "difficulty", "length")


def load(path: Path, subset: str = "") -> list[Sample]:
    """Every question of the file, or of `longbench-v2.jsonl` or `data.json` of a directory.

    Context, line break and question are the official zero-shot prompt to the character.
    """
    samples = []
    for row in files.rows(path, ["longbench-v2", "longbench_v2", "data", "train"]):
        choices = {letter: row.text(f"choice_{letter}").strip() for letter in "ABCD"}
        if row.text("answer") not in choices:
            raise row.refused("answer", "A, B, C, D")
        context, question = documents.cut(
            _BEFORE.format(context=row.text("context").strip()),
            _AFTER.format(question=row.text("question").strip(), **choices),
        )
        samples.append(
            documents.sample(
                task="longbench-v2",
                subset="",
                key=row.text("_id", str(row.number)),
                context=context,
                question=question,
                answers=(row.text("answer"),),
                max_new_tokens=128,
                metadata={k: row.text(k) for k in _INFORMATIVE if row.values.get(k) is not None},
            )
        )
    return documents.distinct(samples)


def score(sample: Sample, answer: str) -> float:
    """1 where the reply states the right letter. No letter counts 0, as officially."""
    return float(stated_letter(answer) in sample.answers)


TASK = Task(
    name="longbench-v2",
    summary="LongBench v2: hard multiple-choice questions on long texts",
    load=load,
    score=score,
    haystacks=lambda subset: (),
)
