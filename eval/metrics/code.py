"""Similarity of code: of one line, and of one function among others."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

_FENCE = re.compile(r"^```(?:\w+)?\s*\n(.*?)(?=^```)```", re.DOTALL | re.MULTILINE)
_SAME_FUNCTION = 0.8  # the threshold of RepoQA's and SCBench's headline number


def edit_similarity(reply: str, answer: str) -> float:
    """Similarity of the reply's first line of code with the answer, in hundredths.

    The first line with none of "`", "#" and "//" in it is compared. Similarity is 1 minus the
    insertions and deletions that make one text the other, divided by their total length, rounded
    to hundredths: `fuzz.ratio` of the official fuzzywuzzy with python-Levenshtein.

    Source: LongBench metrics.py `code_sim_score`.
    """
    try:
        from rapidfuzz.distance import Indel
    except ImportError:
        raise ImportError("scores of code need rapidfuzz: pip install 'kvjax[eval]'") from None
    lines = reply.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in ("`", "#", "//"))), "")
    return round(100 * Indel.normalized_similarity(line, answer)) / 100


def function_found(reply: str, name: str, functions: Mapping[str, str]) -> float:
    """1 where, of all functions of the repository, the reply is most like the one called `name`.

    Likeness is sentence BLEU-4 of the words split at white space, with Chen and Cherry's
    smoothing 4, and has to be at least 0.8. The reply is its first fenced block, or all of it.

    Deviation: the official scorer takes, by a parser of the language, the first function within
    the blocks; a block with text around the function therefore scores lower here.

    Source: RepoQA (arXiv 2406.06025); SCBench repo_qa_utils.py.
    """
    blocks = _FENCE.findall(reply.strip())
    code = blocks[0] if blocks else reply.strip()
    best, likeness = "", 0.0
    for candidate, text in functions.items():
        found = bleu(code, text)
        if found > likeness:
            best, likeness = candidate, found
    return float(best == name and likeness >= _SAME_FUNCTION)


def bleu(reply: str, answer: str) -> float:
    """Sentence BLEU-4 of the words split at white space, Chen and Cherry's smoothing 4."""
    try:
        from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
    except ImportError:
        raise ImportError("scores of functions need nltk: pip install 'kvjax[eval]'") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # texts without a common n-gram
        return float(
            sentence_bleu(
                [re.split(r"\s+", answer.strip())],
                re.split(r"\s+", reply.strip()),
                smoothing_function=SmoothingFunction().method4,
            )
        )
