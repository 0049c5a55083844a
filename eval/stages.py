"""The stages of a batch of samples, and what the harness asks of whatever runs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from eval.prompt import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefilled:
    """A batch of contexts of one bucket after their shared prefill."""

    tokens: Any  # [B, bucket], padded
    logits: Any  # [B, V], of the last token
    cache: Any  # the full cache of all layers
    observations: Any  # what the policies asked to see
    lengths: tuple[int, ...]
    bucket: int
    seconds: float
    nbytes: int  # of the full cache of one context
    replay_seconds: float = 0.0  # of the second pass that some policies ask for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What one compressed context measures."""

    nbytes: int  # sum of the sizes of its arrays
    alive_nbytes: int  # of the entries in it, without empty slots, and of a memory of others
    alive: float  # entries per KV head, mean over layers and heads
    kept: np.ndarray  # [prompt length] share of layers and heads that keep the token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compressed:
    """What one policy leaves of a batch of contexts."""

    cache: Any
    logits: Any  # [B, V], of the last token of the context
    rows: tuple[Row, ...]
    seconds: float  # scoring and compaction, and the replay if the policy needs it
    # (policy, budgets [B], params) where it evicts while decoding too, or has to be read
    evicting: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """What the compressed contexts of one layout, decoding side by side, said."""

    tokens: list[list[list[int]]]  # of every policy and every context; without the end token
    question_seconds: float
    decode_seconds: float
    steps: int  # decode steps until the last row stopped


class Engine(Protocol):
    """Prefill, compress, answer. Times are in seconds and leave compilation out."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model that answers."""

    @property
    def policies(self) -> Mapping[str, Any]:
        """By label; "full" is one of them."""

    @property
    def context_limit(self) -> int:
        """The most tokens, prompt and answer together, that the model was made for."""

    @property
    def compile_seconds(self) -> float:
        """Spent on compilation so far."""

    @property
    def model_seconds(self) -> float:
        """Spent in calls of the model so far, compilation left out."""

    def bucket(self, length: int) -> int:
        """The padded length of prompts of `length` tokens."""

    def room(self, question: int, max_new_tokens: int) -> int:
        """Slots for a question of so many tokens and its answer, padded as questions are."""

    def resolve(self, budget: int | float | str, length: int) -> int:
        """Entries per KV head that `budget` allows a prompt of `length` tokens."""

    def layout(self, label: str, budget: int, bucket: int, room: int) -> Hashable:
        """Slots per head that this policy needs at `budget`, and `room` tokens more.

        Policies of one layout can decode side by side.
        """

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefilled:
        """One pass over prompts of one bucket that serves every policy and every budget."""

    def compress(
        self, prefilled: Prefilled, label: str, budgets: Sequence[int], layout: Any
    ) -> Compressed:
        """The caches that the policy `label` leaves of the prefilled ones."""

    def answer(
        self,
        prefilled: Prefilled,
        compressed: Sequence[Compressed],
        questions: Sequence[Sequence[int]],
        max_new_tokens: int,
    ) -> Answers:
        """Asks every context its question in one batch, and decodes greedily."""

    def versions(self) -> Mapping[str, str]:
        """Of what can change a result."""

    def identity(self) -> Mapping[str, str]:
        """Hashes of what the names of model and policies stand for (`eval.identity`)."""
