"""Classification: which labels a reply names."""

from __future__ import annotations

from collections.abc import Sequence


def classification(reply: str, answer: str, classes: Sequence[str]) -> float:
    """1 divided by the number of labels the reply names, 0 where the right one is not among them.

    A named label that is part of the right one does not count. As in the official loop, which
    removes from the list it walks over, the label after a removed one is not examined.

    Source: LongBench metrics.py `classification_score`.
    """
    named = [name for name in classes if name in reply]
    i = 0
    while i < len(named):
        if named[i] in answer and named[i] != answer:
            # Removes the first of its name, which a list of classes holds once.
            named.remove(named[i])
        i += 1
    return 1 / len(named) if answer in named else 0.0
