"""One interface to text: encode, decode, chat templates, end tokens, streaming."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Tokens with which chat templates end a turn; a model may emit one that its config omits.
TERMINATORS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "</s>",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")

type Message = Mapping[str, Any]


class Tokenizer:
    """A fast tokenizer of `transformers` with its chat template and end tokens.

    `end_tokens` holds the ids given (those of the model's configs), the tokenizer's own, and
    every terminator of known chat templates that is in the vocabulary.
    """

    def __init__(self, fast: Any, end_tokens: Iterable[int] = ()) -> None:
        if not getattr(fast, "is_fast", False):
            raise ValueError(
                f"tokenizer {type(fast).__name__}: allowed are fast tokenizers (tokenizer.json)"
            )
        self.fast = fast
        ends = {int(token) for token in end_tokens}
        if fast.eos_token_id is not None:
            ends.add(fast.eos_token_id)
        added = fast.get_added_vocab()
        ends.update(added[token] for token in TERMINATORS if token in added)
        self.end_tokens: frozenset[int] = frozenset(ends)

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return len(self.fast)

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template, or None."""
        return self.fast.chat_template

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits that identify vocabulary, merges and chat template."""
        source = json.loads(self.fast.backend_tokenizer.to_str())
        # Truncation and padding are settings of calls, not of the vocabulary.
        source.update(truncation=None, padding=None)
        text = json.dumps([source, self.chat_template], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of `text`; special tokens written out in it become their ids.

        `add_special_tokens` adds what the model expects around plain text (a BOS, say); text
        from `chat` has it already.
        """
        return list(self.fast.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.fast.decode(
            [int(token) for token in ids],
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The messages ({"role": ..., "content": ...}) in the model's chat template.

        Templates come with checkpoints and are not trusted: they run in Jinja's immutable
        sandbox. Raises `ValueError` when there is no template or it refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template: pass plain text to encode")
        import jinja2

        try:
            return self.fast.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refused: {_one_line(error)}") from error

    def chat_ids(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of `chat(messages)`."""
        return self.encode(self.chat(messages, add_generation_prompt))

    def stream(self, skip_special_tokens: bool = True) -> TokenStream:
        """An incremental decoder for one generated answer."""
        return TokenStream(self, skip_special_tokens)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the files from which `AutoTokenizer` reads this tokenizer."""
        self.fast.save_pretrained(os.fspath(directory))

    @classmethod
    def from_directory(
        cls, directory: str | os.PathLike[str], end_tokens: Iterable[int] = ()
    ) -> Tokenizer:
        """The tokenizer of a Hugging Face directory, without running code from it."""
        transformers = import_transformers()
        try:
            fast = transformers.AutoTokenizer.from_pretrained(
                os.fspath(directory), trust_remote_code=False, local_files_only=True
            )
        except Exception as error:
            raise ValueError(f"{directory}: unreadable tokenizer ({_one_line(error)})") from error
        return cls(fast, end_tokens)


class TokenStream:
    """Decodes token by token; text is held back until its bytes are whole characters."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Decoding depends on neighbours (a leading space, split bytes): the tokens already
        # shown that still matter stay in front of the new ones.
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that `token` completes, often empty inside a multi-byte character."""
        self._ids.append(int(token))
        before, after = self._texts()
        if len(after) <= len(before) or after.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._ids, self._shown = self._ids[self._shown :], len(self._ids) - self._shown
        return after[len(before) :]

    def flush(self) -> str:
        """The text held back so far; incomplete bytes come out as U+FFFD."""
        before, after = self._texts()
        self._ids, self._shown = [], 0
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        before = self._tokenizer.decode(self._ids[: self._shown], self._skip)
        return before, self._tokenizer.decode(self._ids, self._skip)


def find_end_tokens(*configs: Mapping[str, Any] | None) -> frozenset[int]:
    """The `eos_token_id` entries (an int or a list) of config and generation config dicts."""
    found: set[int] = set()
    for config in configs:
        value = None if config is None else config.get("eos_token_id")
        if value is not None:
            found.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(found)


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds tokenizer files."""
    return any((directory / name).exists() for name in TOKENIZER_FILES)


def import_transformers() -> Any:
    """Import transformers without its notice that PyTorch is missing, which is intended here."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return importlib.import_module("transformers")
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
