"""An engine without a model: it keeps what a policy's name says, and answers from what it kept."""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from eval import config
from eval.stages import Answers, Compressed, Prefilled, Row


class WordTokenizer:
    """Words, single digits, marks and line breaks; ids in order of appearance."""

    end_tokens = frozenset({0, 1})
    fingerprint = "words"

    def __init__(self):
        self.words = ["<end>", "<|im_end|>"]
        self.ids = {word: i for i, word in enumerate(self.words)}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        del add_special_tokens
        found = []
        for word in re.findall(r"<\|\w+\|>| ?[A-Za-z]+| ?\d|\s|[^\w\s]", text):
            if word not in self.ids:
                self.ids[word] = len(self.words)
                self.words.append(word)
            found.append(self.ids[word])
        return found

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[i] if i < len(self.words) else "?" for i in ids)

    def stream(self):
        raise NotImplementedError

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        start = "<|im_start|>system\nHelp.<|im_end|>\n"
        return start + turns + ("<|im_start|>assistant\n" if add_generation_prompt else "")


class FakeEngine:
    """Policies: "full" keeps all, "first" the first tokens, "last" the last, "broken" raises."""

    context_limit = 4096
    compile_seconds = 0.0

    def __init__(
        self,
        labels=("full", "first", "last"),
        fail_prefill=(),
        stop_after=None,
        wide=(),
        most=10**9,
        model="a",
        gates="b",
        device="cpu",
    ):
        self.tokenizer = WordTokenizer()
        self.policies = dict.fromkeys(labels)
        self.prefills: list[int] = []
        self.batches: list[int] = []
        self.shapes: set[tuple[int, int, int]] = set()
        self.prefill_batches: list[int] = []
        self.model_seconds = 0.0
        self.most = most  # contexts in one prefill
        self.model, self.gates, self.device = model, gates, device
        self.fail_prefill = set(fail_prefill)
        self.stop_after = stop_after
        self.wide = wide

    def bucket(self, length: int) -> int:
        return -(-length // 64) * 64

    def room(self, question: int, max_new_tokens: int) -> int:
        return -(-question // 16) * 16 + max_new_tokens

    def resolve(self, budget, length: int) -> int:
        return round(budget * length) if isinstance(budget, float) else min(int(budget), length)

    def layout(self, label: str, budget: int, bucket: int, room: int) -> int:
        return (bucket if label in ("full", *self.wide) else budget) + room

    def prefill(self, prompts) -> Prefilled:
        if self.stop_after is not None and len(self.prefills) >= self.stop_after:
            raise KeyboardInterrupt
        for tokens in prompts:
            self.prefills.append(len(tokens))
        self.prefill_batches.append(len(prompts))
        if len(self.prefills) in self.fail_prefill or len(prompts) > self.most:
            raise RuntimeError("out of <memory>")
        bucket = self.bucket(max(map(len, prompts)))
        self.model_seconds += 0.5
        return Prefilled(
            tokens=None,
            logits=None,
            cache=[list(tokens) for tokens in prompts],
            observations=None,
            lengths=tuple(map(len, prompts)),
            bucket=bucket,
            seconds=0.5,
            nbytes=8 * bucket,
        )

    def compress(self, prefilled: Prefilled, label: str, budgets, layout: int) -> Compressed:
        if label == "broken":
            raise RuntimeError("scores are not finite")
        self.shapes.add((prefilled.bucket, layout, len(self.policies)))
        caches, rows = [], []
        for tokens, budget in zip(prefilled.cache, budgets, strict=True):
            kept = {"full": tokens, "first": tokens[:budget], "last": tokens[-budget:]}[label]
            share = np.zeros(len(tokens))
            share[: len(kept)] = 1
            if label == "last":
                share = share[::-1]
            caches.append(kept)
            rows.append(
                Row(
                    nbytes=8 * layout,
                    alive_nbytes=8 * len(kept),
                    alive=float(len(kept)),
                    kept=share,
                )
            )
        return Compressed(cache=caches, logits=None, rows=tuple(rows), seconds=0.1)

    def answer(self, prefilled, compressed, questions, max_new_tokens) -> Answers:
        del prefilled
        self.batches.append(len(compressed))
        answers = []
        for policy in compressed:
            answers.append([])
            for kept, question in zip(policy.cache, questions, strict=True):
                text = self.tokenizer.decode(kept + list(question))
                number = re.search(r"special magic numbers for \S+ is: (\d+)", text)
                answer = f" {number[1]}." if number else " I do not know."
                answers[-1].append(self.tokenizer.encode(answer)[:max_new_tokens])
        return Answers(tokens=answers, question_seconds=0.2, decode_seconds=0.4, steps=8)

    def identity(self) -> dict[str, str]:
        return {"model (float32)": self.model, "policy first": self.gates}

    def versions(self) -> dict[str, str]:
        return {"jax": "fake", "device": self.device}


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


def untimed(results) -> list:
    """The samples without the wall's times; the fake's own are constant."""
    return [dataclasses.replace(s, wall_seconds=0, model_seconds=0) for s in results.samples]
