"""LongBench: 21 tasks of about 5,000 to 15,000 words in English, Chinese and code.

Bai et al., LongBench (arXiv 2308.14508); github.com/THUDM/LongBench (LongBench/pred.py, eval.py,
metrics.py, config/dataset2prompt.json, config/dataset2maxlen.json). The files are those of
data.zip of the hub data set THUDM/LongBench, unpacked: `qasper.jsonl`, and `qasper_e.jsonl` of
LongBench-E.

Prompts, lengths of replies, metrics and the cut of replies to their first line are the official
ones. The official code also ends a reply of samsum at its first line break; here it is generated
on and cut afterwards, which scores the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from eval.metrics.code import edit_similarity
from eval.metrics.f1 import f1, f1_chinese_words
from eval.metrics.labels import classification
from eval.metrics.numerals import share_of_numbers
from eval.metrics.rouge import rouge_l, rouge_l_chinese
from eval.tasks import documents, files
from eval.tasks.base import Sample, Task

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words.\n\nThe following are given passages.\n{context}\n\nAnswer the question based "
    "on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
_PROMPTS = {
    "narrativeqa": (
        "You are given a story, which can be either a novel or a movie script, and a question. "
        "Answer the question as concisely as you can, using a single phrase if possible. Do not "
        "provide any explanation.\n\nStory: {context}\n\nNow, answer the question based on the "
        "story as concisely as you can, using a single phrase if possible. Do not provide any "
        "explanation.\n\nQuestion: {input}\n\nAnswer:"
    ),
    "qasper": (
        "You are given a scientific article and a question. Answer the question as concisely as "
        "you can, using a single phrase or sentence if possible. If the question cannot be "
        'answered based on the information in the article, write "unanswerable". If the question '
        'is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide any '
        "explanation.\n\nArticle: {context}\n\n Answer the question based on the above article as "
        "concisely as you can, using a single phrase or sentence if possible. If the question "
        'cannot be answered based on the information in the article, write "unanswerable". If '
        'the question is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide '
        "any explanation.\n\nQuestion: {input}\n\nAnswer:"
    ),
    "multifieldqa_en": (
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
        "question based on the above text, only give me the answer and do not output any other "
        "words.\n\nQuestion: {input}\nAnswer:"
    ),
    "multifieldqa_zh": (
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，"
        "不要输出任何其他字词。\n\n问题：{input}\n回答："
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "dureader": (
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n"
        "问题：{input}\n回答："
    ),
    "gov_report": (
        "You are given a report by a government agency. Write a one-page summary of the report."
        "\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:"
    ),
    "qmsum": (
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the "
        "query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:"
    ),
    "multi_news": (
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
        "{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:"
    ),
    "vcsum": (
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结："
    ),
    "trec": (
        "Please determine the type of the question below. Here are some examples of questions."
        "\n\n{context}\n{input}"
    ),
    "triviaqa": (
        "Answer the question based on the given passage. Only give me the answer and do not "
        "output any other words. The following are some examples.\n\n{context}\n\n{input}"
    ),
    "samsum": (
        "Summarize the dialogue into a few short sentences. The following are some examples."
        "\n\n{context}\n\n{input}"
    ),
    "lsht": "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
    "passage_count": (
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
        "Please carefully read these paragraphs and determine how many unique paragraphs there "
        "are after removing duplicates. In other words, how many non-repeating paragraphs are "
        "there in total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after "
        "removing duplicates. The output format should only contain the number, such as 1, 2, 3, "
        "and so on.\n\nThe final answer is: "
    ),
    "passage_retrieval_en": (
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
        "paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}"
        "\n\nPlease enter the number of the paragraph that the abstract is from. The answer "
        'format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: '
    ),
    "passage_retrieval_zh": (
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"
        '下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式'
        "\n\n答案是："
    ),
    "lcc": "Please complete the code given below. \n{context}Next line of code:\n",
    "repobench-p": "Please complete the code given below. \n{context}{input}Next line of code:\n",
}
_REPLY_TOKENS = {
    "narrativeqa": 128,
    "qasper": 128,
    "hotpotqa": 32,
    "2wikimqa": 32,
    "musique": 32,
    "dureader": 128,
    "gov_report": 512,
    "qmsum": 512,
    "multi_news": 512,
    "vcsum": 512,
    "triviaqa": 32,
    "samsum": 128,
    "passage_count": 32,
    "passage_retrieval_en": 32,
    "passage_retrieval_zh": 32,
}  # the others: 64
_PLAIN = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")  # without a chat template
_FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
_NOT_IN_E = (
    "narrativeqa",
    "multifieldqa_zh",
    "musique",
    "dureader",
    "qmsum",
    "vcsum",
    "lsht",
    "passage_retrieval_zh",
)
_METRICS: dict[str, Callable[[str, tuple[str, ...]], float]] = {
    "multifieldqa_zh": f1_chinese_words,
    "dureader": rouge_l_chinese,
    "gov_report": rouge_l,
    "qmsum": rouge_l,
    "multi_news": rouge_l,
    "vcsum": rouge_l_chinese,
    "samsum": rouge_l,
}  # the others with answers in words: f1
SUBSETS = (*_PROMPTS, *(f"{name}_e" for name in _PROMPTS if name not in _NOT_IN_E))


def load(path: Path, subset: str) -> list[Sample]:
    """Every sample of a LongBench file, or of the file `subset`.jsonl of a directory.

    The context of a sample ends with the document, or with the examples of a few-shot task; the
    question is the rest of the official prompt. The two, with the line break between them, are the
    official prompt to the character; only code that does not end with a line break (lcc,
    repobench-p) gets one more.
    """
    documents.check_subset("longbench", subset, SUBSETS)
    base = _base(subset)
    samples = []
    for row in files.rows(path, [subset]):
        context, question = documents.prompt_parts(
            _PROMPTS[base], "context", context=row.text("context"), input=row.text("input")
        )
        answers = row.texts("answers")
        metadata: dict[str, object] = {}
        if not answers:
            raise row.refused("answers", "a list of at least one text")
        if base in ("trec", "lsht"):
            metadata["all_classes"] = list(row.texts("all_classes"))
        if base.startswith("passage_retrieval") and not all(_digits(a) for a in answers):
            raise row.refused("answers", "a list of texts that hold a paragraph's number")
        for informative in ("length", "language", "dataset"):
            if row.values.get(informative) is not None:
                metadata[informative] = row.values[informative]
        samples.append(
            documents.sample(
                task="longbench",
                subset=subset,
                key=row.text("_id", str(row.number)),
                context=context,
                question=question,
                answers=answers,
                max_new_tokens=_REPLY_TOKENS.get(base, 64),
                chat=base not in _PLAIN,
                metadata=metadata,
            )
        )
    return documents.distinct(samples)


def score(sample: Sample, answer: str) -> float:
    """The official metric of the sample's task: the best over the answers, in [0, 1].

    Source: LongBench/eval.py `scorer`.
    """
    base = _base(sample.task.removeprefix("longbench/"))
    if base in _FIRST_LINE:
        answer = answer.lstrip("\n").split("\n")[0]
    if base in ("trec", "lsht"):
        classes = sample.metadata["all_classes"]
        return max(classification(answer, a, classes) for a in sample.answers)
    if base in ("lcc", "repobench-p"):
        return max(edit_similarity(answer, a) for a in sample.answers)
    if base == "passage_count":
        return max(share_of_numbers(answer, a) for a in sample.answers)
    if base.startswith("passage_retrieval"):
        return max(share_of_numbers(answer, _digits(a)) for a in sample.answers)
    return _METRICS.get(base, f1)(answer, sample.answers)


def _base(subset: str) -> str:
    return subset.removesuffix("_e") if subset not in _PROMPTS else subset


def _digits(text: str) -> str:
    """The number of "Paragraph 12" or "段落12"; "" where there is none."""
    for word in ("Paragraph ", "段落"):
        after = text.partition(word)[2]
        number = after[: len(after) - len(after.lstrip("0123456789"))]
        if number:
            return number
    return ""


TASK = Task(
    name="longbench",
    summary="LongBench: question answering, summaries, few-shot, retrieval and code",
    load=load,
    source=lambda path, subset: files.source(path, [subset]),
    score=score,
    subsets=SUBSETS,
    haystacks=lambda subset: (),
)
