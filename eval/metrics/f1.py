"""F1 of the tokens of a reply and an answer, for English and Chinese."""

from __future__ import annotations

import functools
import re
import string
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿"
    "–—‘’‛“”„‟…‧﹏."
)


def normalised(text: str) -> str:
    """Lower case without punctuation, articles and spare white space (SQuAD's normal form)."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", text).split())


def normalised_chinese(text: str) -> str:
    """Lower case without Latin and Chinese punctuation and without white space."""
    dropped = set(string.punctuation + _CHINESE_PUNCTUATION)
    return "".join("".join(c for c in text.lower() if c not in dropped).split())


def token_f1(reply: Sequence[str], answer: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the tokens, each counted as often as it occurs."""
    common = sum((Counter(reply) & Counter(answer)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(reply), common / len(answer)
    return 2 * precision * recall / (precision + recall)


def f1(reply: str, answers: Iterable[str]) -> float:
    """The best F1 of English words over the answers.

    Source: LongBench metrics.py `qa_f1_score`, InfiniteBench compute_scores.py `qa_f1_score`.
    """
    words = normalised(reply).split()
    return max((token_f1(words, normalised(answer).split()) for answer in answers), default=0.0)


def f1_chinese_words(reply: str, answers: Iterable[str]) -> float:
    """The best F1 of Chinese words, as jieba cuts them, over the answers.

    Source: LongBench metrics.py `qa_f1_zh_score`.
    """
    words = _words(reply)
    return max((token_f1(words, _words(answer)) for answer in answers), default=0.0)


def f1_chinese_characters(reply: str, answers: Iterable[str]) -> float:
    """The best F1 of Chinese characters over the answers.

    Source: InfiniteBench compute_scores.py `qa_f1_score_zh`.
    """
    characters = normalised_chinese(reply)
    return max((token_f1(characters, normalised_chinese(a)) for a in answers), default=0.0)


def cut_chinese(text: str) -> list[str]:
    """Words of a Chinese text, punctuation and white space included."""
    return list(_jieba().cut(text, cut_all=False))


def _words(text: str) -> list[str]:
    return [w for w in map(normalised_chinese, cut_chinese(text)) if w]


@functools.cache
def _jieba():
    try:
        with warnings.catch_warnings():
            # jieba 0.42 spells regular expressions in a way newer Pythons warn about.
            warnings.simplefilter("ignore", SyntaxWarning)
            import jieba
    except ImportError:
        raise ImportError(
            "scores of Chinese answers need jieba: pip install 'kvjax[eval]'"
        ) from None
    jieba.setLogLevel("WARNING")
    return jieba
