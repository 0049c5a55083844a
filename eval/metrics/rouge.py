"""ROUGE-L as LongBench and as InfiniteBench compute it: two different numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from eval.metrics.f1 import cut_chinese


def rouge_l(reply: str, answers: Iterable[str]) -> float:
    """The best ROUGE-L F-measure of LongBench over the answers.

    LongBench takes `rouge-l` of the package `rouge` 1.0.1. With C the words that lie on a longest
    common subsequence of any sentence of the answer and any sentence of the reply, R the words of
    the reply and A those of the answer, all three as sets of distinct words split at white space:
    F = 2 P Q / (P + Q), P = |C| / |R|, Q = |C| / |A|. Sentences end at full stops; case and other
    punctuation count. Other implementations measure something else: rouge-score's `rougeL` is one
    subsequence of the whole texts, in lower case, each word as often as it occurs. For a reply of
    three repeated paragraphs this formula gives 0.400 and rougeL 0.211; for two short summaries
    0.485 and 0.526; for "the cat sat on the mat." and "the cat is on the mat." both give 0.833.

    Deviations from `rouge`: none in the formula. Where a sentence has around 1000 words and more,
    the package exceeds Python's recursion limit and LongBench counts 0; this does not.

    Source: LongBench metrics.py `rouge_score`; Lin, ROUGE (ACL 2004), section 3.2.
    """
    return max((_summary_f(reply, answer) for answer in answers), default=0.0)


def rouge_l_chinese(reply: str, answers: Iterable[str]) -> float:
    """The best `rouge_l` over the answers of words as jieba cuts them.

    Source: LongBench metrics.py `rouge_zh_score`.
    """
    spaced = " ".join(cut_chinese(reply))
    return rouge_l(spaced, (" ".join(cut_chinese(answer)) for answer in answers))


def rouge_lsum(reply: str, answers: Iterable[str]) -> float:
    """The best rougeLsum F-measure over the answers, lines as sentences, words not stemmed.

    Source: InfiniteBench compute_scores.py `get_score_one_longbook_sum_eng`, which calls
    `evaluate`'s rouge, and this in turn google-research's rouge-score, as here.
    """
    score = _scorer().score
    return max((score(answer, reply)["rougeLsum"].fmeasure for answer in answers), default=0.0)


def _summary_f(reply: str, answer: str) -> float:
    replied, asked = _sentences(reply), _sentences(answer)
    if not replied or not asked:
        return 0.0
    common: set[str] = set()
    for sentence in asked:
        for candidate in replied:
            common.update(_common_subsequence(sentence, candidate))
    precision = len(common) / len({w for s in replied for w in s})
    recall = len(common) / len({w for s in asked for w in s})
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    # A sentence of white space alone counts as one empty word, as it does in the package.
    return [" ".join(s.split()).split(" ") for s in text.split(".") if s]


def _common_subsequence(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """A longest common subsequence; of several, the one the package `rouge` finds."""
    lengths = [[0] * (len(b) + 1)]
    for word in a:
        above, row = lengths[-1], [0]
        for j, other in enumerate(b):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        lengths.append(row)
    found, i, j = [], len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            found.append(a[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


@functools.cache
def _scorer() -> Callable:
    try:
        from rouge_score import rouge_scorer
    except ImportError:
        raise ImportError(
            "scores of summaries need rouge-score: pip install 'kvjax[eval]'"
        ) from None
    return rouge_scorer.RougeScorer(["rougeLsum"], use_stemmer=False)
