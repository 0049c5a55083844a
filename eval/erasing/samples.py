"""One question about a context of which parts are to be taken out."""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Callable, Mapping
from typing import Any

from eval.prompt import Template, Tokenizer

type CountTokens = Callable[[str], int]


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of the context; `erased` parts are the spans."""

    text: str
    erased: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErasingSample:
    """A context in parts, and a question whose right answer is that of the context without spans.

    `distractor` is what the spans would have one answer, None where they say nothing to the point.
    """

    id: str
    suite: str
    seed: int
    parts: tuple[Part, ...]
    question: str
    answer_prefix: str
    answer: str
    distractor: str | None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def context(self) -> str:
        """The text with its spans."""
        return "".join(part.text for part in self.parts)

    @property
    def clean(self) -> str:
        """The text as though the spans had never been there."""
        return "".join(part.text for part in self.parts if not part.erased)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErasingPrompt:
    """A sample's token ids; parts are tokenised apart, so that the clean context is a subset."""

    context: list[int]
    spans: list[tuple[int, int]]  # of tokens within `context`
    question: list[int]
    answer: list[int]

    @property
    def clean(self) -> list[int]:
        """`context` without its spans."""
        kept, start = [], 0
        for first, last in self.spans:
            kept += self.context[start:first]
            start = last
        return kept + self.context[start:]


def prompt_of(sample: ErasingSample, tokenizer: Tokenizer) -> ErasingPrompt:
    """The sample as the model gets it: one user turn, and the reply begun.

    A space between two parts goes to the second, as tokenizers have it in front of a word.
    """
    template = Template.of(tokenizer)
    context, spans, space = list(tokenizer.encode(template.head)), [], ""
    for part in sample.parts:
        text = (space + part.text).removesuffix(" ")
        space = (space + part.text)[len(text) :]
        ids = tokenizer.encode(text)
        if part.erased:
            spans.append((len(context), len(context) + len(ids)))
        context += ids
    if space:
        context += tokenizer.encode(space)
    question = template.question_text(sample.question, sample.answer_prefix)
    answer = sample.answer if question[-1].isspace() else f" {sample.answer}"
    return ErasingPrompt(
        context=context,
        spans=spans,
        question=tokenizer.encode(question),
        answer=tokenizer.encode(answer),
    )


def normalised(text: str) -> str:
    """As SQuAD compares answers: lower case, no punctuation, no articles, single spaces."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def exact_match(sample: ErasingSample, text: str) -> float:
    """1 where the reply begins with the answer, both `normalised`."""
    wanted = normalised(sample.answer).split()
    return float(normalised(text).split()[: len(wanted)] == wanted)


def distractor_hit(sample: ErasingSample, text: str) -> float:
    """1 where the reply has what the spans say."""
    if sample.distractor is None:
        return 0.0
    return float(f" {normalised(sample.distractor)} " in f" {normalised(text)} ")
