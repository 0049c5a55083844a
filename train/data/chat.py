"""Conversations from JSONL, JSON or parquet in a tokenizer's chat template."""

from __future__ import annotations

import hashlib

from eval.prompt import Tokenizer
from eval.tasks import files
from train.data import paths, turns
from train.data.config import ChatConfig
from train.data.examples import Example

_ROLES = ("system", "user", "assistant", "tool")


class ChatSource:
    """A conversation by its index: {"messages": [{"role": ..., "content": ...}, ...]} in a row.

    Raises:
      ValueError: no such file, a row that is no conversation with an answer in it, or a template
        that does not render a conversation's beginning as the beginning of its rendering.
    """

    def __init__(self, config: ChatConfig, tokenizer: Tokenizer):
        turns.check_template(tokenizer)
        self._tokenizer = tokenizer
        self._everything = config.labels == "all"
        self._places: list[str] = []
        self._conversations: list[list[turns.Message]] = []
        for file in paths.expand(config.chat, paths.ROWS):
            for row in files.rows(file, ()):
                self._places.append(row.place)
                self._conversations.append(_conversation(row, config.field))
        digest = hashlib.sha256(repr(self._conversations).encode()).hexdigest()[:16]
        self.identity = f"chat of {len(self)} conversations, labels={config.labels}, {digest}"

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, index: int) -> Example:
        conversation = self._conversations[index]
        try:
            return turns.tokenized(self._tokenizer, conversation, self._everything)
        except ValueError as error:
            raise ValueError(f"{self._places[index]}: {error}") from error


def _conversation(row: files.Row, field: str) -> list[turns.Message]:
    messages = []
    for message in row.rows(field):
        if message.text("role") not in _ROLES:
            raise message.refused("role", ", ".join(_ROLES))
        messages.append({"role": message.text("role"), "content": message.text("content")})
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or answers[0] == 0:
        raise row.refused(field, "messages of which one, not the first, is the assistant's")
    return messages
