"""English words by class, from the package wonderwords."""

from __future__ import annotations

import functools

CLASSES = ("noun", "adjective", "verb")


@functools.cache
def words(word_class: str) -> tuple[str, ...]:
    """Every noun, adjective or verb of wonderwords in lower-case ASCII letters, sorted."""
    import wonderwords

    found = wonderwords.RandomWord().filter(include_categories=[word_class])
    return tuple(sorted({w for w in found if w.isascii() and w.isalpha() and w.islower()}))
