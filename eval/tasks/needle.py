"""RULER's single needle (niah_single): one key, one number, found again from its key."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator

from eval.haystacks import Haystack
from eval.tasks.base import CountTokens, Sample, Task, string_match

_INTRODUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
_NEEDLE = "One of the special magic numbers for {key} is: {value}."
_QUESTION = "What is the special magic number for {key} mentioned in the provided text?"
_ANSWER_PREFIX = "The special magic number for {key} mentioned in the provided text is"
_TOLERANCE = 0.02


def make(
    haystack: Haystack, length: int, depth: float, seed: int, count_tokens: CountTokens
) -> Sample:
    """A sample whose whole prompt has at most `length` tokens, and at least 98 % of them.

    The needle stands at the sentence break (noise: line break) closest to `depth`, a share of the
    characters of the haystack. Definition: RULER (arXiv 2404.06654), niah_single_1 (noise) and
    niah_single_2 (prose), at a fixed depth and with the needle's key drawn from adjective-noun
    pairs, its value from the seven-digit numbers.

    Raises:
      ValueError: `length` is too short for the template and the needle.
    """
    name = f"needle/{haystack.kind}/{length}/d{depth:g}/s{seed}"
    rng = random.Random(name)
    key, value = _key(rng), str(rng.randint(10**6, 10**7 - 1))
    stream = haystack.stream(rng)
    needle = _NEEDLE.format(key=key, value=value)
    question, prefix = _QUESTION.format(key=key), _ANSWER_PREFIX.format(key=key)

    def count(sentences: list[str]) -> int:
        return count_tokens(_context(haystack, sentences, needle, depth), question, prefix)

    if count([]) > length:
        raise ValueError(
            f"length={length}: too short for task needle; allowed are lengths >= {count([])}"
        )
    sentences = _fill(stream, count, length)
    total = count(sentences)
    if total < (1 - _TOLERANCE) * length:
        raise ValueError(f"length={length}: too short to be met within 2 %; allowed is more")
    context = _context(haystack, sentences, needle, depth)
    if context.count(value) != 1 or context.count(key) != 1:
        # One chance in millions with prose; with a user's file it may be a fact of the file.
        raise ValueError(f"haystack {haystack.kind}: contains the key {key!r} or number {value}")
    start = context.index(needle)
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
        metadata={
            "key": key,
            "needle": needle,
            "needle_span": [start, start + len(needle)],
            "tokens": total,
            "haystack_sha256": haystack.sha256,
        },
    )


def _context(haystack: Haystack, sentences: list[str], needle: str, depth: float) -> str:
    """Introduction, haystack, and the needle at the allowed break nearest to `depth`."""
    ends = list(itertools.accumulate(len(s) for s in sentences))
    breaks = [0] + [
        i + 1 for i, s in enumerate(sentences) if s.endswith("\n") or not haystack.breaks_at_lines
    ]
    if len(sentences) not in breaks:
        breaks.append(len(sentences))
    target = depth * (ends[-1] if ends else 0)
    at = min(breaks, key=lambda i: (abs((ends[i - 1] if i else 0) - target), i))
    before, after = "".join(sentences[:at]), "".join(sentences[at:])
    if haystack.breaks_at_lines:
        before = before if not before or before.endswith("\n") else before.rstrip() + "\n"
        inserted = f"{needle}\n"
    else:
        inserted = f"{needle} "
    return (_INTRODUCTION + before + inserted + after).rstrip()


def _fill(stream: Iterator[str], count: Callable[[list[str]], int], length: int) -> list[str]:
    """The most sentences that fit; the last is cut at a word where more than 1 % is missing."""
    sentences: list[str] = []
    used = step = count(sentences)
    while used < length:
        # Whole doublings first, so that long contexts need few calls of the tokenizer.
        step = max(1, math.floor((length - used) / max(used, 1) * max(len(sentences), 1)))
        sentences += itertools.islice(stream, step)
        used = count(sentences)
    low, high = 0, len(sentences)
    while low < high:
        middle = (low + high + 1) // 2
        if count(sentences[:middle]) <= length:
            low = middle
        else:
            high = middle - 1
    kept, following = sentences[:low], sentences[low : low + 1]
    if following and count(kept) < 0.99 * length:
        words = following[0].split()
        for end in range(len(words) - 1, 0, -1):
            cut = " ".join(words[:end]).rstrip(",;:.") + ".\n"
            if count([*kept, cut]) <= length:
                return [*kept, cut]
    return kept


def _key(rng: random.Random) -> str:
    nouns, adjectives = _words()
    return f"{rng.choice(adjectives)}-{rng.choice(nouns)}"


@functools.cache
def _words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    import wonderwords

    def words(category: str) -> tuple[str, ...]:
        found = wonderwords.RandomWord().filter(include_categories=[category])
        return tuple(sorted({w for w in found if w.isascii() and w.isalpha() and w.islower()}))

    return words("noun"), words("adjective")


TASK = Task(
    name="needle",
    summary="RULER niah_single: one number hidden in the text, asked for by its key",
    make=make,
    score=string_match,
)
