"""The answer to a sample as a model is to write it, after the sample's answer prefix."""

from __future__ import annotations

from eval.tasks.base import Sample
from eval.tasks.ruler import question_answering


def answer_text(sample: Sample) -> str:
    """A space, then the answer, in the form of the solved example where RULER's prompt has one.

    vt: the names, separated by spaces. cwe: "1. word 2. word ...". Questions about documents: the
    first of the answers that count as right. All else: a sentence's end, several as "a, b, and c.":
    in the order of the question or of their frequency, and the values of one key in that of the
    context, where nothing else tells which comes first.
    """
    subset = sample.task.rpartition("/")[2]
    answers = sample.answers
    if subset == "vt":
        return f" {' '.join(answers)}"
    if subset == "cwe":
        return "".join(f" {number}. {word}" for number, word in enumerate(answers, 1))
    if subset in question_answering.FORMATS:
        return f" {answers[0]}"
    if subset == "niah_multivalue":
        answers = tuple(sorted(answers, key=sample.context.index))
    if len(answers) == 1:
        return f" {answers[0]}."
    return f" {', '.join(answers[:-1])}, and {answers[-1]}."
