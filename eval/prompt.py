"""One prompt as two texts: what is prefilled and compressed, and what follows it."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from eval.tasks.base import Sample

PROTOCOLS = ("hidden", "seen")
_SENTINEL = "KVJAXUSERTURN"


class Tokenizer(Protocol):
    end_tokens: frozenset[int]

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...
    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
    """The chat template around one user turn: the text before it and the text after it."""

    head: str
    tail: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Template:
        """Renders the template of `tokenizer` around a marker and splits it there.

        Raises:
          ValueError: the template drops, repeats or rewrites the user's text.
        """
        rendered = _render(tokenizer, _SENTINEL)
        if rendered.count(_SENTINEL) != 1:
            raise ValueError(
                f"chat template: the user's text occurs {rendered.count(_SENTINEL)} times in it; "
                "allowed are templates that hold it exactly once"
            )
        head, tail = rendered.split(_SENTINEL)
        probe = "First line.\nSecond line, with a <tag> & 1234567?"
        if _render(tokenizer, probe) != head + probe + tail:
            raise ValueError("chat template: it rewrites the user's text; none such is supported")
        return cls(head=head, tail=tail)

    def context_text(self, context: str) -> str:
        return self.head + context

    def question_text(self, question: str, answer_prefix: str) -> str:
        gap = " " if answer_prefix and self.tail and not self.tail[-1].isspace() else ""
        return f"\n{question}{self.tail}{gap}{answer_prefix}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids of a sample: `prefill` is compressed, `question` is extended afterwards.

    The two parts of the text are tokenised apart in both protocols, so that "hidden" and "seen"
    put the same tokens before the model.
    """

    prefill: list[int]
    question: list[int]  # empty under the protocol "seen"
    needle: tuple[int, int] | None  # the needle's tokens within `prefill`, where the task says


class Prompter:
    """Tokenises samples with one tokenizer, template and protocol."""

    def __init__(self, tokenizer: Tokenizer, protocol: str = "hidden"):
        if protocol not in PROTOCOLS:
            raise ValueError(f"question={protocol!r}: allowed are {', '.join(PROTOCOLS)}")
        self.tokenizer, self.protocol = tokenizer, protocol
        self.template = Template.of(tokenizer)

    def count(self, context: str, question: str, answer_prefix: str) -> int:
        """Tokens of the whole prompt."""
        encode = self.tokenizer.encode
        return len(encode(self.template.context_text(context))) + len(
            encode(self.template.question_text(question, answer_prefix))
        )

    def prompt(self, sample: Sample) -> Prompt:
        encode = self.tokenizer.encode
        prefill = encode(self.template.context_text(sample.context))
        question = encode(self.template.question_text(sample.question, sample.answer_prefix))
        span = sample.metadata.get("needle_span")
        needle = None
        if span is not None:
            start, end = (len(encode(self.template.context_text(sample.context[:i]))) for i in span)
            needle = (start, end)
        if self.protocol == "seen":
            return Prompt(prefill=prefill + question, question=[], needle=needle)
        return Prompt(prefill=prefill, question=question, needle=needle)


def _render(tokenizer: Tokenizer, content: str) -> str:
    return tokenizer.chat([{"role": "user", "content": content}], add_generation_prompt=True)
