"""A chat template taken apart, so that each turn is rendered and tokenised once."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

_USER, _ANSWER, _NEXT = "KVJAXUSERA", "KVJAXANSWERB", "KVJAXUSERC"
_PROBE = " First line.\nSecond line, with a <tag> & 1234567? \n"


@runtime_checkable
class ChatTokenizer(Protocol):
    """What a session needs of a tokenizer; `kvjax.models.tokenizer.Tokenizer` has it."""

    end_tokens: frozenset[int]

    @property
    def fingerprint(self) -> str: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...
    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str: ...
    def stream(self, skip_special_tokens: bool = True) -> Any: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnTemplate:
    """The text around the turns of a conversation.

    preface (first_opening text tail answer closing) (opening text tail answer closing) ...

    In ChatML the preface is the system message, `opening` the user's header, `tail` the end of
    the user's message with the assistant's header, and `closing` what ends the answer.
    """

    preface: str
    first_opening: str
    opening: str
    tail: str
    closing: str
    trims: bool  # the template strips white space around messages

    @classmethod
    def of(cls, tokenizer: ChatTokenizer, system: str | None = None) -> TurnTemplate:
        """Renders a marked conversation and cuts it at the marks.

        Raises:
          ValueError: no template, or one that drops, repeats, reorders or rewrites messages.
        """
        user, answer, following = (
            {"role": role, "content": mark}
            for role, mark in (("user", _USER), ("assistant", _ANSWER), ("user", _NEXT))
        )
        first = [] if system is None else [{"role": "system", "content": system}]
        head, first_tail = _split(tokenizer.chat([*first, user]), _USER)
        # Without the system message: some templates put it before the last user message, but
        # in the cache it stands before the first.
        rendered = tokenizer.chat([user, answer, following])
        _, between, tail = _split(rendered, _ANSWER, _NEXT)
        if tail != first_tail:
            raise ValueError("chat template: it ends the first and later turns differently")
        _, end = _split(tokenizer.chat([user, answer], add_generation_prompt=False), _ANSWER)
        closing = end if between.startswith(end) else ""
        opening = between.removeprefix(closing)
        split = bool(opening) and head.endswith(opening)
        return cls(
            preface=head.removesuffix(opening) if split else head,
            first_opening=opening if split else "",
            opening=opening,
            tail=tail,
            closing=closing,
            trims=_trims(tokenizer, first, head, tail),
        )

    def turn(self, text: str, *, first: bool, unclosed: bool = False) -> str:
        """What follows the cached conversation when the user says `text`."""
        opening = self.first_opening if first else self.opening
        return (self.closing if unclosed else "") + opening + self.said(text) + self.tail

    def said(self, text: str) -> str:
        """The text as the template writes it."""
        return text.strip() if self.trims else text


def _split(rendered: str, *marks: str) -> list[str]:
    pieces, rest = [], rendered
    for mark in marks:
        if rest.count(mark) != 1:
            raise ValueError(
                f"chat template: a message occurs {rendered.count(mark)} times in it; allowed are "
                "templates that hold every message exactly once, in order"
            )
        before, rest = rest.split(mark)
        pieces.append(before)
    return [*pieces, rest]


def _trims(tokenizer: ChatTokenizer, first: list[dict[str, str]], head: str, tail: str) -> bool:
    rendered = tokenizer.chat([*first, {"role": "user", "content": _PROBE}])
    if rendered == head + _PROBE + tail:
        return False
    if rendered == head + _PROBE.strip() + tail:
        return True
    raise ValueError("chat template: it rewrites the user's text; none such is supported")
