"""Token counts of long texts from those of their words, each of which is tokenised once."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

from eval.prompt import Prompter
from eval.tasks.base import CountTokens, Sample

# Most tokenizers split before a word's space and nowhere else in it. Of line breaks some make
# tokens of their own (GPT-2), others join them to the full stop before them (Llama 3).
PATTERNS = (re.compile(r"\s*\S+|\s+"), re.compile(r"[^\S\n]*\S+\n*|\s+"))
_CACHED = 2**16
_TOLERANCE = 0.005


def word_counter(
    encode: Callable[[str], list[int]], pattern: re.Pattern[str] = PATTERNS[0]
) -> Callable[[str], int]:
    """A function that gives the tokens of a text as the sum over its words."""
    count = functools.lru_cache(_CACHED)(lambda word: len(encode(word)))
    return lambda text: sum(map(count, pattern.findall(text)))


def prompt_counter(prompter: Prompter, samples: Sequence[Sample]) -> CountTokens:
    """Counts the tokens of a prompt by its words, or whole where that is off for one of `samples`.

    Making one sample counts a dozen times, and counting whole is what it spends its time on.
    """

    def by_words(pattern: re.Pattern[str]) -> CountTokens:
        words, template = word_counter(prompter.tokenizer.encode, pattern), prompter.template

        def count(context: str, question: str, answer_prefix: str) -> int:
            follows = template.question_text(question, answer_prefix)
            return words(template.context_text(context)) + words(follows)

        return count

    def error(count: CountTokens) -> float:
        texts = [(sample.context, sample.question, sample.answer_prefix) for sample in samples]
        return max(abs(count(*text) / prompter.count(*text) - 1) for text in texts)

    errors = [(error(count), count) for count in map(by_words, PATTERNS)]
    least, best = min(errors, key=lambda pair: pair[0])
    return best if least <= _TOLERANCE else prompter.count
