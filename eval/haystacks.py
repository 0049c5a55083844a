"""Text to hide things in: noise, made-up sentences, prose of Python and its libraries, a file."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import inspect
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path

from eval import sentences

KINDS = ("noise", "sentences", "prose", "docstrings")

_NOISE = (
    "The grass is green. ",
    "The sky is blue. ",
    "The sun is yellow. ",
    "Here we go. ",
    "There and back again.\n",
)
_DOCUMENTED = (
    "numpy", "numpy.fft", "numpy.linalg", "numpy.ma", "numpy.random", "jax", "jax.lax", "jax.numpy",
    "optax",
)  # fmt: skip
_ROLE = re.compile(r"(?::[\w:+-]+:)?`~?([^`<]*?)(?: <[^`]*>)?`_?")  # :func:`~jax.jit` or `jax.jit`
_MIN_PROSE_WORDS = 12
_PLAIN_WORD = re.compile(r"[\"'(]*[A-Za-z][A-Za-z'\-]*[\"').,;:]*")


@dataclasses.dataclass(frozen=True)
class Haystack:
    """Sentences that can be repeated to any length; each carries the white space that follows it.

    A needle goes only where `breaks_at_lines` allows: after a line (noise, where RULER gives the
    needle a line of its own) or after any sentence.
    """

    kind: str
    sentences: tuple[str, ...]
    breaks_at_lines: bool
    source: str  # what a reader needs in order to get the same text

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256("".join(self.sentences).encode()).hexdigest()

    def stream(self, rng: random.Random) -> Iterator[str]:
        """Endless sentences; noise starts at its beginning, all else at a random paragraph."""
        start = 0 if self.breaks_at_lines else rng.choice(self._paragraphs)
        return itertools.islice(itertools.cycle(self.sentences), start, None)

    @functools.cached_property
    def _paragraphs(self) -> list[int]:
        """The first sentence of each; thousands, of which every sample draws one."""
        last = len(self.sentences) - 1
        return [0] + [i + 1 for i, s in enumerate(self.sentences[:last]) if s.endswith("\n")]


def load(name: str) -> Haystack:
    """The haystack called `name`: "noise", "sentences", "prose", "docstrings" or "file:PATH".

    Raises:
      ValueError: unknown name, or a file that is missing, not UTF-8 or has no text.
    """
    if name == "noise":
        return Haystack("noise", _NOISE, True, "RULER's noise sentences")
    if name == "sentences":
        return _made_up()
    if name == "prose":
        return _prose()
    if name == "docstrings":
        return _docstrings()
    if name.startswith("file:"):
        return _file(Path(name.removeprefix("file:")).expanduser())
    raise ValueError(f"haystack {name!r}: allowed are {', '.join(KINDS)} and file:PATH")


@functools.cache
def _made_up() -> Haystack:
    return Haystack("sentences", sentences.sentences(), False, sentences.source())


@functools.cache
def _prose() -> Haystack:
    from pydoc_data.topics import topics

    paragraphs = [p for topic in sorted(topics) for p in prose_paragraphs(topics[topic])]
    # Topics quote one another: a paragraph is taken once.
    unique = tuple(dict.fromkeys(paragraphs))
    return Haystack("prose", _sentences(unique), False, "pydoc_data.topics of this Python")


@functools.cache
def _docstrings() -> Haystack:
    """What the arrays' libraries say of their functions; no sentence of it is in "prose"."""
    modules = [importlib.import_module(name) for name in _DOCUMENTED]
    texts = [
        inspect.getdoc(member) or ""
        for module in modules
        for name, member in sorted(vars(module).items())
        if not name.startswith("_") and not inspect.ismodule(member)
    ]
    paragraphs = [p for text in texts for p in prose_paragraphs(_ROLE.sub(r"\1", text))]
    versions = [f"{m.__name__} {m.__version__}" for m in modules if "." not in m.__name__]
    unique = tuple(dict.fromkeys(p for p in paragraphs if not re.search(r"`|:\w+:", p)))
    source = f"docstrings of {', '.join(versions)}"
    return Haystack("docstrings", _sentences(unique), False, source)


def _file(path: Path) -> Haystack:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ValueError(
            f"haystack file {str(path)!r}: {reason}; a UTF-8 text file is needed"
        ) from error
    blocks = re.split(r"\n\s*\n", text)
    paragraphs = tuple(p for p in (" ".join(block.split()) for block in blocks) if p)
    if not paragraphs:
        raise ValueError(f"haystack file {str(path)!r} is empty; a text file is needed")
    return Haystack(f"file:{path.name}", _sentences(paragraphs), False, f"file {path.name}")


def prose_paragraphs(markup: str) -> list[str]:
    """The paragraphs of reST `markup` that read as prose, on one line each, without its markup."""
    paragraphs = []
    for block in re.split(r"\n[ \t]*\n", markup):
        lines = block.strip("\n").split("\n")
        if any(line.startswith((" ", "\t", ">>>", "* ", "...")) for line in lines):
            continue
        if any(re.fullmatch(r"[*=\-~^\"+| ]{3,}", line) for line in lines):
            continue
        # Lines were wrapped at hyphens: "built-\nin" is one word.
        text = " ".join(re.sub(r"(?<=[A-Za-z]-)\n(?=[a-z])", "", block).split())
        text = re.sub(r"\s*\[\d+\]", "", text)
        text = re.sub(r"\*\*([^*]+)\*\*|(?<![\w*])\*([^\s*][^*]*)\*", r"\1\2", text)
        text = re.sub(r"\"\"|``", "", text).replace("“", '"').replace("”", '"').replace("’", "'")
        words = text.split()
        plain = sum(bool(_PLAIN_WORD.fullmatch(w)) for w in words)
        if (
            len(words) >= _MIN_PROSE_WORDS
            and text[0].isupper()
            and text[-1] in ".!?"
            and "::=" not in text
            and plain >= 0.8 * len(words)
        ):
            paragraphs.append(text)
    return paragraphs


def _sentences(paragraphs: tuple[str, ...]) -> tuple[str, ...]:
    sentences = []
    for paragraph in paragraphs:
        parts = re.split(r"(?<=[.!?]) +(?=[\"'(A-Z])", paragraph)
        sentences += [f"{part} " for part in parts[:-1]] + [f"{parts[-1]}\n"]
    return tuple(sentences)
