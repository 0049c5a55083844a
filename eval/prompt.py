"""One prompt as two texts: what is prefilled and compressed, and what follows it."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from eval.tasks.base import Sample

PROTOCOLS = ("hidden", "seen")
_SENTINEL = "KVJAXUSERTURN"


class Tokenizer(Protocol):
    end_tokens: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]: ...
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


PLAIN = Template(head="", tail="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids of a sample: `prefill` is compressed, `question` is extended afterwards.

    The two parts of the text are tokenised apart in both protocols, so that "hidden" and "seen"
    put the same tokens before the model.
    """

    prefill: list[int]
    question: list[int]  # empty under the protocol "seen"
    needles: tuple[tuple[int, int], ...] = ()  # of tokens within `prefill`, where the task says
    cut: int = 0  # tokens that were left out of the middle of the context


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

    def question_tokens(self, sample: Sample) -> int:
        """Tokens of what follows the context."""
        return len(self._question(sample))

    def prompt(self, sample: Sample, limit: int | None = None) -> Prompt:
        """The sample's tokens, at most `limit` of the context: its middle goes first.

        Raises:
          ValueError: `limit` leaves nothing of the context.
        """
        encode = self.tokenizer.encode
        template = self.template if sample.chat else PLAIN
        # Plain text gets what the model expects before it (a BOS); templates write it themselves.
        plain = {} if sample.chat else {"add_special_tokens": True}
        prefill = encode(template.context_text(sample.context), **plain)
        question = self._question(sample)
        cut = 0 if limit is None else max(0, len(prefill) - limit)
        needles: tuple[tuple[int, int], ...] = ()
        if cut >= len(prefill):
            raise ValueError(
                f"sample {sample.id}: its question of {len(question)} tokens and its answer leave "
                "no room for the context; allowed is a longer max_length or a shorter answer"
            )
        if cut:
            left = len(prefill) - cut
            prefill = prefill[: left - left // 2] + prefill[len(prefill) - left // 2 :]
        else:
            needles = tuple(self._tokens_of(sample, template, span) for span in _spans(sample))
        if self.protocol == "seen":
            prefill, question = prefill + question, []
        return Prompt(prefill=prefill, question=question, needles=needles, cut=cut)

    def _question(self, sample: Sample) -> list[int]:
        template = self.template if sample.chat else PLAIN
        text = template.question_text(sample.question, sample.answer_prefix)
        return self.tokenizer.encode(text)

    def _tokens_of(
        self, sample: Sample, template: Template, span: tuple[int, int]
    ) -> tuple[int, int]:
        encode = self.tokenizer.encode
        start, end = (len(encode(template.context_text(sample.context[:i]))) for i in span)
        return start, end


def _spans(sample: Sample) -> list[tuple[int, int]]:
    """Characters of the context that hold what is asked for."""
    spans = sample.metadata.get("needle_spans")
    if spans is None:
        spans = [span] if (span := sample.metadata.get("needle_span")) else []
    return [(start, end) for start, end in spans]


def _render(tokenizer: Tokenizer, content: str) -> str:
    return tokenizer.chat([{"role": "user", "content": content}], add_generation_prompt=True)
