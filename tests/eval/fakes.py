"""An engine without a model: it keeps what a policy's name says, and answers from what it kept."""

from __future__ import annotations

import re

import numpy as np

from eval import config
from eval.stages import Answers, Prefilled, Row


class WordTokenizer:
    """Words, single digits, marks and line breaks; ids in order of appearance."""

    end_tokens = frozenset({0, 1})

    def __init__(self):
        self.words = ["<end>", "<|im_end|>"]
        self.ids = {word: i for i, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        found = []
        for word in re.findall(r"<\|\w+\|>| ?[A-Za-z]+| ?\d|\s|[^\w\s]", text):
            if word not in self.ids:
                self.ids[word] = len(self.words)
                self.words.append(word)
            found.append(self.ids[word])
        return found

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[i] if i < len(self.words) else "?" for i in ids)

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        start = "<|im_start|>system\nHelp.<|im_end|>\n"
        return start + turns + ("<|im_start|>assistant\n" if add_generation_prompt else "")


class FakeEngine:
    """Policies: "full" keeps all, "first" the first tokens, "last" the last, "broken" raises."""

    context_limit = 4096

    def __init__(self, labels=("full", "first", "last"), fail_prefill=(), stop_after=None, wide=()):
        self.tokenizer = WordTokenizer()
        self.policies = dict.fromkeys(labels)
        self.prefills: list[int] = []
        self.batches: list[int] = []
        self.shapes: set[tuple[int, int, int]] = set()
        self.fail_prefill = set(fail_prefill)
        self.stop_after = stop_after
        self.wide = wide

    def bucket(self, length: int) -> int:
        return -(-length // 64) * 64

    def question_bucket(self, length: int) -> int:
        return -(-length // 16) * 16

    def resolve(self, budget, length: int) -> int:
        return round(budget * length) if isinstance(budget, float) else min(int(budget), length)

    def layout(self, label: str, budget: int, bucket: int, room: int) -> int:
        return (bucket if label in ("full", *self.wide) else budget) + room

    def prefill(self, tokens) -> Prefilled:
        if self.stop_after is not None and len(self.prefills) == self.stop_after:
            raise KeyboardInterrupt
        self.prefills.append(len(tokens))
        if len(self.prefills) in self.fail_prefill:
            raise RuntimeError("out of <memory>")
        return Prefilled(
            logits=None,
            cache=list(tokens),
            observations=None,
            length=len(tokens),
            bucket=self.bucket(len(tokens)),
            seconds=0.5,
            nbytes=8 * self.bucket(len(tokens)),
        )

    def compress(self, prefilled: Prefilled, label: str, budget: int, layout: int) -> Row:
        if label == "broken":
            raise RuntimeError("scores are not finite")
        self.shapes.add((prefilled.bucket, layout, len(self.policies)))
        tokens = prefilled.cache
        kept = {"full": tokens, "first": tokens[:budget], "last": tokens[-budget:]}[label]
        share = np.zeros(prefilled.length)
        share[: len(kept)] = 1
        if label == "last":
            share = share[::-1]
        return Row(
            cache=kept,
            seconds=0.1,
            nbytes=8 * layout,
            alive_nbytes=8 * len(kept),
            alive=float(len(kept)),
            kept=share,
        )

    def answer(self, prefilled, rows, question, max_new_tokens) -> Answers:
        del prefilled
        self.batches.append(len(rows))
        answers = []
        for row in rows:
            text = self.tokenizer.decode(row.cache + list(question))
            number = re.search(r"special magic numbers for \S+ is: (\d+)", text)
            answer = f" {number[1]}." if number else " I do not know."
            answers.append(self.tokenizer.encode(answer)[:max_new_tokens])
        return Answers(tokens=answers, question_seconds=0.2, decode_seconds=0.4, steps=8)

    def versions(self) -> dict[str, str]:
        return {"jax": "fake"}


def small_config(**changes) -> config.Config:
    content = {
        "model": "fake",
        "tasks": [
            {
                "name": "needle",
                "haystacks": ["noise", "prose"],
                "lengths": [200, 320],
                "depths": [0, 0.5, 1],
                "samples": 2,
            }
        ],
        "policies": ["full", "first", "last"],
        "budgets": [0.5, 0.25],
        "max_new_tokens": 12,
    }
    return config.from_mapping({**content, **changes})


def ignoring_times(results) -> list:
    return [
        (s.id, s.prompt_tokens, [(r.policy, r.budget, r.answer, r.score) for r in s.records])
        for s in results.samples
    ]
