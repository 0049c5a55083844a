"""RULER's single needle (niah_single): one key, one number, found again from its key."""

from __future__ import annotations

import random
from collections.abc import Sequence

from eval.tasks import filling
from eval.tasks.base import Request, Sample, Task, string_match
from eval.words import words

_INTRODUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
_NEEDLE = "One of the special magic numbers for {key} is: {value}."
_QUESTION = "What is the special magic number for {key} mentioned in the provided text?"
_ANSWER_PREFIX = "The special magic number for {key} mentioned in the provided text is"


def make(request: Request) -> Sample:
    """A sample whose whole prompt has at most `request.length` tokens, and at least 98 % of them.

    The needle stands at the sentence break (noise: line break) closest to the depth, a share of the
    characters of the haystack. Definition: RULER (arXiv 2404.06654), niah_single_1 (noise) and
    niah_single_2 (prose), at a fixed depth and with the needle's key drawn from adjective-noun
    pairs, its value from the seven-digit numbers. The answer gets 32 tokens, RULER's 128.

    Raises:
      ValueError: no haystack or depth, or a length too short for the template and the needle.
    """
    haystack, length, depth, seed = request.haystack, request.length, request.depth, request.seed
    if haystack is None or depth is None:
        kind = haystack and haystack.kind
        raise ValueError(
            f"haystack={kind!r}, depth={depth}: task needle needs a haystack and a depth in [0, 1]"
        )
    own_lines = haystack.breaks_at_lines
    name = f"needle/{haystack.kind}/{length}/d{depth:g}/s{seed}"
    rng = random.Random(name)
    key, value = word_key(rng), str(rng.randint(10**6, 10**7 - 1))
    stream = haystack.stream(rng)
    needle = _NEEDLE.format(key=key, value=value)
    question, prefix = _QUESTION.format(key=key), _ANSWER_PREFIX.format(key=key)

    def context_of(sentences: Sequence[str]) -> tuple[str, list[int]]:
        at = filling.break_at_depth(sentences, own_lines, depth)
        text, spans = filling.insert(sentences, [needle], [at], own_lines)
        return _INTRODUCTION + text, filling.shifted(spans, len(_INTRODUCTION))[0]

    def count(sentences: Sequence[str]) -> int:
        return request.count_tokens(context_of(sentences)[0], question, prefix)

    filling.check_room("task needle", length, count([]))
    sentences = filling.fill(stream, count, length, filling.sentence_cuts)
    total = count(sentences)
    filling.check_filled(length, total)
    context, span = context_of(sentences)
    if context.count(value) != 1 or context.count(key) != 1:
        # One chance in millions with prose; with a user's file it may be a fact of the file.
        raise ValueError(f"haystack {haystack.kind}: contains the key {key!r} or number {value}")
    return Sample(
        id=name,
        task="needle",
        haystack=haystack.kind,
        seed=seed,
        depth=depth,
        length=length,
        context=context,
        question=question,
        answer_prefix=prefix,
        answers=(value,),
        max_new_tokens=32,
        metadata={
            "key": key,
            "needle": needle,
            "needle_span": span,
            "tokens": total,
            "haystack_sha256": haystack.sha256,
        },
    )


def word_key(rng: random.Random) -> str:
    """An adjective and a noun: the keys of RULER's needles."""
    return f"{rng.choice(words('adjective'))}-{rng.choice(words('noun'))}"


TASK = Task(
    name="needle",
    summary="RULER niah_single: one number hidden in the text, asked for by its key",
    make=make,
    score=string_match,
    depths=True,
)
