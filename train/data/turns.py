"""The assistant's turns in a conversation, as a chat template renders them."""

from __future__ import annotations

from collections.abc import Sequence

from eval.prompt import Tokenizer
from train.data.examples import Example, example

type Message = dict[str, str]

_SENTINEL = "KVJAXASSISTANTTURN"
_QUESTION = {"role": "user", "content": "Question?"}
_PROBE = [_QUESTION, {"role": "assistant", "content": "First."}] * 2


def end_of_turn(tokenizer: Tokenizer) -> int:
    """The end token that the chat template puts behind an answer.

    Raises:
      ValueError: it puts none there.
    """
    answer = {"role": "assistant", "content": _SENTINEL}
    rendered = tokenizer.chat([_QUESTION, answer], add_generation_prompt=False)
    for token in tokenizer.encode(rendered.rpartition(_SENTINEL)[2]):
        if token in tokenizer.end_tokens:
            return token
    raise ValueError(
        "chat template: no end token follows an answer; allowed are templates that end a turn with "
        "one of the tokenizer's end tokens"
    )


def check_template(tokenizer: Tokenizer) -> None:
    """Refuses a chat template under which `turns` cannot tell who says what."""
    turns(tokenizer, _PROBE)


def turns(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[tuple[str, bool]]:
    """The rendered conversation in parts, each with whether it is an answer of the assistant.

    An answer is what follows the rendering of the messages before it, generation prompt included,
    up to the end of the rendering that includes it.

    Raises:
      ValueError: the template renders the beginning of a conversation otherwise than as the
        beginning of its rendering.
    """
    whole = tokenizer.chat(list(messages), add_generation_prompt=False)
    parts, at = [], 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.chat(list(messages[:number]), add_generation_prompt=True)
        through = tokenizer.chat(list(messages[: number + 1]), add_generation_prompt=False)
        if not (whole.startswith(through) and through.startswith(before)) or len(before) < at:
            raise ValueError(
                f"chat template: renders message {number} otherwise when the conversation goes on; "
                "allowed are templates that only ever append"
            )
        parts += [(whole[at : len(before)], False), (whole[len(before) : len(through)], True)]
        at = len(through)
    return [*parts, (whole[at:], False)]


def tokenized(tokenizer: Tokenizer, messages: Sequence[Message], everything: bool) -> Example:
    """The conversation's tokens; answers are predicted up to their end token, or `everything` is.

    Parts are tokenised apart, as a prompt and what a model generates after it are.
    """
    parts = []
    for text, answer in turns(tokenizer, messages):
        tokens = tokenizer.encode(text)
        stop = len(tokens) if answer or everything else 0
        if answer and not everything:
            # What a template writes between turns, a line break say, is nothing to generate.
            ends = [i for i, token in enumerate(tokens) if token in tokenizer.end_tokens]
            stop = ends[-1] + 1 if ends else stop
        parts.append((tokens, 0, stop))
    return example(parts)
