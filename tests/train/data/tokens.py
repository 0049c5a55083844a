"""A tokenizer of words whose ids are the same in every process."""

from __future__ import annotations

import re
import zlib
from typing import ClassVar

from tests.eval.fakes import WordTokenizer


class StableTokenizer(WordTokenizer):
    """The words of `WordTokenizer`; an id is a hash of its word, not the order of appearance."""

    fingerprint = "stable words"
    known: ClassVar[dict[int, str]] = {0: "<end>", 1: "<|im_end|>"}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        del add_special_tokens
        found = []
        for word in re.findall(r"<\|\w+\|>| ?[A-Za-z]+| ?\d|\s|[^\w\s]", text):
            token = 1 if word == "<|im_end|>" else 2 + zlib.crc32(word.encode()) % 2**30
            assert self.known.setdefault(token, word) == word
            found.append(token)
        return found

    def decode(self, ids) -> str:
        return "".join(self.known[int(token)] for token in ids)


class StartingTokenizer(StableTokenizer):
    """Puts "<|start|>" before plain text, as models with a BOS token want it."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        start = super().encode("<|start|>") if add_special_tokens else []
        return start + super().encode(text)
