"""Requests for RULER's subsets, two ways to count tokens, and small files of questions."""

from __future__ import annotations

import json
import os
import random
import re

import pytest

from eval import haystacks
from eval.tasks import ruler
from eval.tasks.base import Request
from eval.words import words

LENGTHS = (1024, 2048, 4096)


def count_words(context: str, question: str, answer_prefix: str) -> int:
    """Words, digits, marks and line breaks of one chat turn."""
    text = f"<user>{context}\n{question}<assistant>{answer_prefix}"
    return len(re.findall(r"[A-Za-z]+|\d|[^\w ]", text))


@pytest.fixture(scope="session")
def count_tokens():
    """Tokens of the default model's tokenizer, without its weights."""
    from kvjax.models import checkpoint
    from kvjax.models.gguf_file import GGUFFile
    from kvjax.models.gguf_tokenizer import read_tokenizer

    try:
        path = checkpoint.embedded_path(checkpoint.DEFAULT_MODEL)
    except FileNotFoundError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    tokenizer = read_tokenizer(GGUFFile(path).field)

    def count(context: str, question: str, answer_prefix: str) -> int:
        user = [{"role": "user", "content": f"{context}\n{question}"}]
        return len(tokenizer.encode(tokenizer.chat(user) + answer_prefix))

    return count


@pytest.fixture(scope="session")
def make(question_files):
    """make(subset, ...): a sample with the subset's own haystack, or the one named."""

    def make(subset, length=1024, seed=0, haystack=None, depth=None, count=count_words, path=None):
        names = (haystack,) if haystack else ruler.TASK.haystacks(subset)
        return ruler.TASK.make(
            Request(
                subset=subset,
                haystack=haystacks.load(names[0]) if names else None,
                length=length,
                depth=depth,
                seed=seed,
                count_tokens=count,
                path=path or question_files.get(subset),
            )
        )

    return make


@pytest.fixture(scope="session")
def question_files(tmp_path_factory):
    """Files in the formats of SQuAD 2.0 and HotpotQA, by subset."""
    directory = tmp_path_factory.mktemp("questions")
    files = {"qa_1": directory / "squad.json", "qa_2": directory / "hotpot.json"}
    files["qa_1"].write_text(json.dumps(_squad(random.Random(1))))
    files["qa_2"].write_text(json.dumps(_hotpot(random.Random(2))))
    return files


def _text(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choices(words("noun"), k=rng.randint(least, most))) + "."


def _squad(rng: random.Random) -> dict:
    def question(i, answers):
        texts = [{"text": text, "answer_start": 0} for text in answers]
        return {"id": f"q{i}", "question": _text(rng, 4, 8), "answers": texts}

    articles = []
    for i in range(20):
        paragraphs = [
            {
                "context": _text(rng, 40, 160),
                "qas": [
                    question(j, [f"Answer {i}-{j}", f"answer {i}-{j}", f"Answer {i}-{j}"]),
                    {**question(-j, []), "is_impossible": True},
                ],
            }
            for j in range(8)
        ]
        articles.append({"title": f"Article {i}", "paragraphs": paragraphs})
    return {"version": "v2.0", "data": articles}


def _hotpot(rng: random.Random) -> list:
    return [
        {
            "_id": str(i),
            "question": _text(rng, 5, 9),
            "answer": f"Answer {i}",
            "supporting_facts": [[f"Title {i}-3", 0], [f"Title {i}-7", 1], [f"Title {i}-7", 2]],
            "context": [
                [f"Title {i}-{j}", [_text(rng, 10, 25) + " " for _ in range(3)]] for j in range(10)
            ],
        }
        for i in range(20)
    ]
