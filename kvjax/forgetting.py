"""Forgetting a part of a conversation: which tokens are meant, and what becomes of the record."""

from __future__ import annotations

import dataclasses

import numpy as np

from kvjax import erasing
from kvjax.cache import Cache
from kvjax.conversation import Conversation
from kvjax.erasing.note import PromptNote
from kvjax.learned.eraser import Eraser
from kvjax.models.decoder import Decoder
from kvjax.passages import only_span, token_span, token_texts
from kvjax.turns import ChatTokenizer


def find(
    conversation: Conversation,
    tokenizer: ChatTokenizer,
    tail: str,
    span: tuple[int, int] | None,
    text: str | None,
    turn: int | None,
) -> tuple[int, int]:
    """The token positions that are meant; `tail` is what the template puts behind a question.

    Raises:
      ValueError: nothing or too much is given; a turn that is not there or was cut; text that
        does not occur exactly once.
    """
    seen = conversation.tokens_seen
    if len(conversation.tokens) != seen:
        raise ValueError("erase: this session was saved without its tokens; allowed are newer ones")
    if (span is not None) == (text is not None or turn is not None):
        raise ValueError("erase: give a span of token positions, or a text, a turn or both")
    if span is not None:
        return span
    start, stop = 0, seen
    if turn is not None:
        count = len(conversation.turns)
        if not -count <= turn < count:
            allowed = f"{-count} to {count - 1}" if count else "none, nothing was said"
            raise ValueError(f"turn {turn}: allowed are {allowed}")
        chosen = conversation.turns[turn]
        start, stop = chosen.start, chosen.end
        if text is None:
            if not chosen.complete:
                raise ValueError(f"turn {turn} was cut by a rollback: give a text or a span of it")
            texts = token_texts(tokenizer, conversation.tokens[start : chosen.answer_start])
            at = "".join(texts).removesuffix(tail).rfind(chosen.text)
            if at < 0:
                raise ValueError(f"turn {turn}: its tokens do not spell its text; give a span")
            first, behind = token_span(texts, at, at + len(chosen.text))
            return first + start, behind + start
    assert text is not None
    texts = token_texts(tokenizer, conversation.tokens[start:stop])
    return only_span(texts, text, first=start)


def forget(
    model: Decoder,
    cache: Cache,
    conversation: Conversation,
    span: tuple[int, int],
    method: erasing.Method | str,
    eraser: Eraser | None,
) -> tuple[Cache, Conversation]:
    """Cache and record after the edit; where the method moves what follows, so do its turns.

    Raises:
      ValueError: a method that appends text; whatever `kvjax.erase` refuses.
    """
    method = erasing.erasing_method(method) if isinstance(method, str) else method
    if isinstance(method, PromptNote):
        raise ValueError(f"method {method.name!r} appends text: say it in a turn instead")
    tokens = np.array([conversation.tokens], np.int32)
    edited = erasing.erase(model, eraser, cache, tokens, span, method=method)
    if method.moves:
        return edited, conversation.without(*span)
    # A new record, by which an answer that is still being read knows that the session went on.
    return edited, dataclasses.replace(conversation)
