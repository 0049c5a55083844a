"""LongMemEval: questions on a history of chats between a user and an assistant.

Wu et al., LongMemEval (arXiv 2410.10813); github.com/xiaowu0162/LongMemEval
(src/generation/run_generation.py, src/evaluation/evaluate_qa.py). The files are the released
`longmemeval_s.json` (about 115,000 tokens a question), `longmemeval_m.json` (about 500 sessions)
and `longmemeval_oracle.json` (the sessions with the evidence alone), or their cleaned editions.

The official judge is a language model (GPT-4o) that is asked whether the reply is right. `score`
is NOT that judge; see there. Its numbers may be compared with one another, not with published ones.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from eval.metrics.f1 import normalised
from eval.tasks import documents, files
from eval.tasks.base import Absent, Sample, Task

_PROMPT = (
    "I will give you several history chats between you and a user. Please answer the question "
    "based on the relevant chat history.\n\n\nHistory Chats:\n\n{history}\n\nCurrent Date: {date}\n"
    "Question: {question}\nAnswer:"
)
_SESSION = "\n### Session {number}:\nSession Date: {date}\nSession Content:\n\n{turns}\n"
_REPLY_TOKENS = 500
_RUBRICS = "single-session-preference"
_UNANSWERED = (
    "did not mention",
    "didnt mention",
    "havent mentioned",
    "hasnt mentioned",
    "not mentioned",
    "never mentioned",
    "no mention",
    "no information",
    "not provided",
    "not provide",
    "not enough information",
    "insufficient information",
    "information is incomplete",
    "not specified",
    "does not say",
    "doesnt say",
    "do not know",
    "dont know",
    "do not have information",
    "dont have information",
    "do not have any information",
    "dont have any information",
    "cannot be answered",
    "cannot answer",
    "cannot determine",
    "cannot be determined",
    "unanswerable",
    "unable to",
)
SUBSETS = ("s", "m", "oracle")


def load(path: Path, subset: str) -> list[Sample]:
    """Every question of the file, or of `longmemeval_<subset>.json` of a directory.

    The whole history is given, its sessions in the order of their dates and as JSON, and the
    question is asked directly (officially: `full-history-session`, history format `json`, reading
    method `direct`). Context, line break and question are the official prompt to the character.

    Questions of the type single-session-preference are left out: their answers are rubrics for the
    judge, which no reply contains. `metadata["left_out"]` says how many.

    Raises:
      Absent: no such file, or no question in it that is not left out.
      ValueError: a field is wrong.
    """
    documents.check_subset("longmemeval", subset, SUBSETS)
    samples: list[Sample] = []
    left_out = 0
    for row in files.rows(path, _names(subset)):
        key, kind = row.text("question_id"), row.text("question_type")
        if kind == _RUBRICS:
            left_out += 1
            continue
        context, question = documents.prompt_parts(
            _PROMPT,
            "history",
            history=_history(row),
            date=row.text("question_date"),
            question=row.text("question"),
        )
        samples.append(
            documents.sample(
                task="longmemeval",
                subset=subset,
                key=key,
                context=context,
                question=question,
                answers=row.answers("answer"),
                max_new_tokens=_REPLY_TOKENS,
                metadata={"question_type": kind, "abstention": "_abs" in key},
            )
        )
    if not samples:
        raise Absent(f"{path}: all of its questions are of the type {_RUBRICS}, which are left out")
    if left_out:
        note = f"{left_out} questions of the type {_RUBRICS} are left out: no rule can judge them"
        samples = [
            dataclasses.replace(sample, metadata={**sample.metadata, "left_out": note})
            for sample in samples
        ]
    return documents.distinct(samples)


def _names(subset: str) -> list[str]:
    return [f"longmemeval_{subset}", f"longmemeval_{subset}_cleaned"]


def score(sample: Sample, answer: str) -> float:
    """1 where the reply contains the answer: a rule in place of the official judge, a model.

    Both are compared without case, punctuation and articles, as runs of whole words. That is
    stricter than the judge for answers in other words, and close to it for names and numbers.
    Abstention questions (`metadata["abstention"]`) have no answer; they count 1 where the reply
    says by one of some thirty phrases that the information is missing.
    """
    words = f" {normalised(answer)} "
    if sample.metadata["abstention"]:
        return float(any(f" {phrase} " in words for phrase in _UNANSWERED))
    return float(any(f" {normalised(a)} " in words for a in sample.answers))


def _history(row: files.Row) -> str:
    dates, sessions = row.texts("haystack_dates"), row.values.get("haystack_sessions")
    if not isinstance(sessions, list) or len(sessions) != len(dates):
        raise row.refused("haystack_sessions", f"a list of {len(dates)} lists, one for each date")
    turns = []
    for i in range(len(sessions)):
        field = f"haystack_sessions[{i}]"
        session = files.Row(row.place, row.number, {field: sessions[i]}).rows(field)
        turns.append([_turn(t) for t in session])
    ordered = sorted(zip(dates, turns, strict=True), key=lambda session: session[0])
    return "".join(
        _SESSION.format(number=i, date=date, turns=json.dumps(session))
        for i, (date, session) in enumerate(ordered, 1)
    )


def _turn(turn: files.Row) -> dict[str, object]:
    for field in ("role", "content"):
        turn.text(field)
    # The mark on turns that hold the evidence is not for the reader.
    return {k: v for k, v in turn.values.items() if k != "has_answer"}


TASK = Task(
    name="longmemeval",
    summary="LongMemEval: questions on a long history of chats; scored by a rule, not by a model",
    load=load,
    source=lambda path, subset: files.source(path, _names(subset)),
    score=score,
    subsets=SUBSETS,
    haystacks=lambda subset: (),
)
