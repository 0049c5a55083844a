"""RULER's questions about documents (qa): the one that answers among many that do not."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence

from eval.tasks import filling
from eval.tasks.base import Request, Sample
from eval.tasks.ruler import question_files

_INSTRUCTION = (
    "Answer the question based on the given documents. "
    "Only give me the answer and do not output any other words.\n\n"
)
_INTRODUCTION = f"{_INSTRUCTION}The following are given documents.\n\n"
_QUESTION = f"{_INSTRUCTION}Question: {{question}}"
_ANSWER_PREFIX = "Answer:"
_MAX_NEW_TOKENS = 32


# Format of the file of questions, by subset.
FORMATS = {"qa_1": question_files.SQUAD, "qa_2": question_files.HOTPOT}


def make(request: Request) -> Sample:
    """The question number `request.seed` of the file, in its documents (RULER's qa.py).

    SQuAD (qa_1): its paragraph, then the other paragraphs of its article, then all others. HotpotQA
    (qa_2): the paragraphs that support the answer, then the others given with the question, then
    all others. Within each group the order is drawn; as many as fit are shuffled. Deviations: the
    paragraphs given with a HotpotQA question, which RULER always keeps, give way where the length
    does not hold them; the last document may be cut. Seeds start over behind the last question.

    Raises:
      Absent: no file, or a directory without a file of this kind.
      ValueError: a malformed file, or a length too short for the paragraphs or too long for the
        file.
    """
    task, length = f"ruler/{request.subset}", request.length
    data = question_files.read(request.path, FORMATS[request.subset], task)
    asked = data.questions[request.seed % len(data.questions)]
    name = f"{task}/documents/{length}/s{request.seed}"
    rng = random.Random(name)
    near, known = _without(asked.near, asked.gold), {*asked.gold, *asked.near}
    far = _without([d for d in data.documents if d not in known], asked.gold)
    others = rng.sample(near, len(near)) + rng.sample(far, len(far))
    order = rng.getrandbits(64)
    question = _QUESTION.format(question=asked.text)

    def context(documents: Sequence[str]) -> tuple[str, list[int]]:
        shuffled = random.Random(order).sample(range(len(documents)), len(documents))
        text, spans = _INTRODUCTION, []
        for number, i in enumerate(shuffled, 1):
            head = f"Document {number}:\n"
            if i < len(asked.gold):
                spans.append([len(text) + len(head), len(text) + len(head) + len(documents[i])])
            text += f"{head}{documents[i]}\n\n"
        # The second line break stands before the question.
        return text[:-1], spans

    def count(documents: Sequence[str]) -> int:
        return request.count_tokens(context(documents)[0], question, _ANSWER_PREFIX)

    gold = list(asked.gold)
    filling.check_room(task, length, count(gold))
    number = filling.most(lambda n: count([*gold, *others[:n]]), length, len(others))
    documents = [*gold, *others[:number]]
    tokens = count(documents)
    if number == len(others) and tokens < 0.98 * length:
        raise ValueError(
            f"length={length}: too long for {task} with {data.name!r}, whose documents end at "
            f"{tokens} tokens; allowed are lengths <= {tokens}"
        )
    if number < len(others) and tokens < 0.99 * length:
        cuts = _document_cuts(others[number])
        documents += filling.longest_cut(lambda part: count([*documents, part]), length, cuts)
        tokens = count(documents)
    filling.check_filled(length, tokens)
    text, spans = context(documents)
    return Sample(
        id=name,
        task=task,
        haystack="documents",
        seed=request.seed,
        depth=None,
        length=length,
        context=text,
        question=question,
        answer_prefix=_ANSWER_PREFIX,
        answers=asked.answers,
        max_new_tokens=_MAX_NEW_TOKENS,
        metadata={
            "file": data.name,
            # Neighbouring questions of SQuAD are about one paragraph.
            "shared": hashlib.sha256("".join(asked.gold).encode()).hexdigest(),
            "documents": len(documents),
            "needle_span": spans[0],
            "needle_spans": spans,
            "tokens": tokens,
        },
    )


def _without(documents: Iterable[str], gold: Sequence[str]) -> list[str]:
    """The documents that quote none of `gold`: each of these is to be there once."""
    return [d for d in documents if not any(text in d for text in gold)]


def _document_cuts(document: str) -> list[str]:
    words = document.split(" ")
    return [" ".join(words[:end]) for end in range(1, len(words))]
