"""Documents of plain text, JSONL, JSON or parquet, every token of which is predicted."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from eval.prompt import Tokenizer
from eval.tasks import files
from train.data import paths
from train.data.config import TextConfig
from train.data.examples import Example, example

_EMPTY_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")


class TextSource:
    """A document by its index.

    Plain text is indexed by its bytes and read when it is asked for; the rows of JSONL, JSON and
    parquet are read at once. A document gets what the tokenizer puts around plain text, a BOS say.

    Raises:
      ValueError: no such file, not UTF-8, no text in it, a row without its field.
    """

    def __init__(self, config: TextConfig, tokenizer: Tokenizer):
        self._encode = tokenizer.encode
        self._files = paths.expand(config.text, (*paths.PLAIN, *paths.ROWS))
        self._rows: list[str] = []
        spans: list[tuple[int, int, int]] = []  # file, first byte, last byte; a row: -1, number
        for number, file in enumerate(self._files):
            if file.suffix in paths.ROWS:
                texts = (row.text(config.field) for row in files.rows(file, ()))
                for text in filter(str.strip, texts):
                    spans.append((-1, len(self._rows), 0))
                    self._rows.append(text)
            else:
                spans += [(number, *span) for span in _documents(file, config)]
        if not spans:
            raise ValueError(f"{', '.join(config.text)}: holds no text; text is needed")
        self._spans = np.asarray(spans, np.int64)
        digest = hashlib.sha256(self._spans.tobytes())
        digest.update(repr(self._rows).encode())
        for file in self._files:
            if file.suffix not in paths.ROWS:
                digest.update(file.read_bytes())
        self.identity = f"text of {len(spans)} documents, {digest.hexdigest()[:16]}"

    def __len__(self) -> int:
        return len(self._spans)

    def text(self, index: int) -> str:
        """The document itself."""
        file, start, stop = (int(n) for n in self._spans[index])
        if file < 0:
            return self._rows[start]
        with self._files[file].open("rb") as handle:
            handle.seek(start)
            return handle.read(stop - start).decode("utf-8")

    def __getitem__(self, index: int) -> Example:
        tokens = self._encode(self.text(index), add_special_tokens=True)
        return example([(tokens, 0, len(tokens))])


def _documents(file: Path, config: TextConfig) -> Iterator[tuple[int, int]]:
    """First and last byte of every document of a file."""
    try:
        content = file.read_bytes()
        content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ValueError(f"{file}: {reason}; a UTF-8 text file is needed") from error
    if config.documents == "files":
        if content.strip():
            yield 0, len(content)
        return
    first = last = size = 0
    for start, stop in _blocks(content):
        # A blank stretch has as many characters as bytes.
        more = (start - last) + len(content[start:stop].decode("utf-8"))
        if size and size + more > config.characters:
            yield first, last
            size = 0
        if not size:
            first, more = start, more - (start - last)
        size, last = size + more, stop
    if size:
        yield first, last


def _blocks(content: bytes) -> Iterator[tuple[int, int]]:
    """First and last byte of every stretch between empty lines that is not blank."""
    start = 0
    for gap in _EMPTY_LINES.finditer(content):
        if content[start : gap.start()].strip():
            yield start, gap.start()
        start = gap.end()
    if content[start:].strip():
        yield start, len(content)
