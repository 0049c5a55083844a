"""RULER's aggregation tasks: the most common words of a list (cwe), of coded text (fwe)."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable

from eval.tasks import filling
from eval.tasks.base import Request, Sample
from eval.words import CLASSES, words

_CWE_INTRODUCTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
_CWE_QUESTION = "Question: What are the 10 most common words in the above list?"
_CWE_ANSWER_PREFIX = "Answer: The top 10 words that appear most often in the list are:"
_CWE_COMMON = 10
# Below this length RULER repeats words less often: (common, other) in the list, then different
# words and repetitions in the solved example.
_CWE_SHORT = 4096
_CWE_REPEATS = {True: ((6, 1), 20, (3, 1)), False: ((30, 3), 40, (10, 3))}

_CWE_LONG = 50_000  # tokens that the plain words certainly fill

_FWE_INTRODUCTION = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. "
)
_FWE_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
_FWE_ANSWER_PREFIX = (
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)
_FWE_ANSWERS = 3
_FWE_LETTERS = 6
_FWE_TOKENS_PER_WORD = 50  # of the vocabulary
_ZETA_2 = math.pi**2 / 6


def make_cwe(request: Request) -> Sample:
    """Ten words 30 times each among others 3 times each (RULER's common_words_extraction.py).

    One solved example comes first: 40 words, ten of them 10 times, the others 3 times. For lengths
    below 4096, RULER's own numbers: 6 times among once, and an example of 20 words, 3 times and
    once. Words are the nouns, adjectives and verbs of wonderwords; where these do not suffice RULER
    goes on to another list, and here compounds of an adjective and a noun ("calmriver") follow.

    Raises:
      ValueError: too short a length for the ten words, or too long a one for the words there are.
    """
    name = f"ruler/cwe/words/{request.length}/s{request.seed}"
    rng = random.Random(name)
    pool = sorted({word for word_class in CLASSES for word in words(word_class)})
    repeats, example_words, example_repeats = _CWE_REPEATS[request.length < _CWE_SHORT]
    drawn = rng.sample(pool, example_words)
    listed = _word_list(drawn, *example_repeats, rng.getrandbits(64))
    solution = " ".join(f"{i}. {word}" for i, word in enumerate(drawn[:_CWE_COMMON], 1))
    start = (
        f"{_CWE_INTRODUCTION}{listed}\n{_CWE_QUESTION} {_CWE_ANSWER_PREFIX} {solution}\n"
        f"{_CWE_INTRODUCTION}"
    )
    chosen = rng.sample(pool, len(pool))
    order = rng.getrandbits(64)
    if request.length > _CWE_LONG:
        chosen += _compounds(rng, 10 * len(pool), set(pool))

    def context(number: int) -> str:
        return start + _word_list(chosen[: _CWE_COMMON + number], *repeats, order)

    return _sample(
        request,
        name,
        context,
        (_CWE_QUESTION, _CWE_ANSWER_PREFIX, 120),
        tuple(chosen[:_CWE_COMMON]),
        available=len(chosen) - _CWE_COMMON,
    )


def make_fwe(request: Request) -> Sample:
    """The three most frequent coded words of a text (RULER's freq_words_extraction.py).

    The k-th of length / 50 words has the share k^-2 / zeta(2) of the text. The first is written
    "..." and is noise; the next three are the answers, each more frequent than the fifth.

    Raises:
      ValueError: too short a length for these words to differ in number.
    """
    name = f"ruler/fwe/words/{request.length}/s{request.seed}"
    rng = random.Random(name)
    size = max(request.length // _FWE_TOKENS_PER_WORD, _FWE_ANSWERS + 2)
    coded: dict[str, None] = {}
    while len(coded) < size - 1:
        coded["".join(rng.choices(string.ascii_lowercase, k=_FWE_LETTERS))] = None
    vocabulary = ["...", *coded]
    order = rng.getrandbits(64)
    # From here on the last answer and the word after it differ by one at least.
    last = _FWE_ANSWERS + 1
    least = math.ceil(_ZETA_2 / (last**-2 - (last + 1) ** -2))

    def context(number: int) -> str:
        counts = [int((least + number) * k**-2 / _ZETA_2) for k in range(1, size + 1)]
        text = [w for w, n in zip(vocabulary, counts, strict=True) for _ in range(n)]
        random.Random(order).shuffle(text)
        return _FWE_INTRODUCTION + " ".join(text)

    answers = tuple(vocabulary[1 : _FWE_ANSWERS + 1])
    return _sample(request, name, context, (_FWE_QUESTION, _FWE_ANSWER_PREFIX, 50), answers)


def _compounds(rng: random.Random, number: int, taken: set[str]) -> list[str]:
    """Different words made of an adjective and a noun, none of them in `taken`."""
    adjectives, nouns = words("adjective"), words("noun")
    found: dict[str, None] = {}
    while len(found) < number:
        word = rng.choice(adjectives) + rng.choice(nouns)
        if word not in taken:
            found[word] = None
    return list(found)


def _word_list(chosen: list[str], common: int, other: int, order: int) -> str:
    """ "1. word 2. word ...": the first ten of `chosen` `common` times, the rest `other` times."""
    entries = chosen[:_CWE_COMMON] * common + chosen[_CWE_COMMON:] * other
    random.Random(order).shuffle(entries)
    return " ".join(f"{i}. {word}" for i, word in enumerate(entries, 1))


def _sample(
    request: Request,
    name: str,
    context: Callable[[int], str],
    asked: tuple[str, str, int],
    answers: tuple[str, ...],
    available: int | None = None,
) -> Sample:
    """The sample with the largest `context(number)` that fits."""
    task, length = f"ruler/{request.subset}", request.length
    question, prefix, max_new_tokens = asked

    def count(number: int) -> int:
        return request.count_tokens(context(number), question, prefix)

    filling.check_room(task, length, count(0))
    number = filling.most(count, length, available)
    tokens = count(number)
    if number == available and tokens < 0.98 * length:
        raise ValueError(
            f"length={length}: too long for {task}, which has {available} words to fill it with; "
            f"allowed are lengths <= {tokens}"
        )
    filling.check_filled(length, tokens)
    return Sample(
        id=name,
        task=task,
        haystack="words",
        seed=request.seed,
        depth=None,
        length=length,
        context=context(number),
        question=question,
        answer_prefix=prefix,
        answers=answers,
        max_new_tokens=max_new_tokens,
        metadata={"tokens": tokens},
    )
