"""The stages of one sample, and what the harness asks of whatever runs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from eval.prompt import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefilled:
    """One sample after its shared prefill."""

    logits: Any  # [1, V], of the last token
    cache: Any  # the full cache of all layers
    observations: Any  # what the policies asked to see
    length: int
    bucket: int
    seconds: float
    nbytes: int  # of the full cache
    replay_seconds: float = 0.0  # of the second pass that some policies ask for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One policy's compressed cache of one sample, and what it measures."""

    cache: Any
    seconds: float  # scoring and compaction, and the replay if the policy needs it
    nbytes: int  # sum of the sizes of its arrays
    alive_nbytes: int  # of the entries in it, without empty slots
    alive: float  # entries per KV head, mean over layers and heads
    kept: np.ndarray  # [prompt length] share of layers and heads that keep the token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """What rows of one capacity, decoding side by side, said."""

    tokens: list[list[int]]  # without the end token
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

    def bucket(self, length: int) -> int:
        """The padded length of prompts of `length` tokens."""

    def question_bucket(self, length: int) -> int:
        """The padded length of questions of `length` tokens."""

    def resolve(self, budget: int | float | str, length: int) -> int:
        """Entries per KV head that `budget` allows a prompt of `length` tokens."""

    def layout(self, label: str, budget: int, bucket: int, room: int) -> Hashable:
        """Slots per head that this policy needs at `budget`, and `room` tokens more."""

    def prefill(self, tokens: Sequence[int]) -> Prefilled:
        """One pass over the prompt that serves every policy and every budget."""

    def compress(self, prefilled: Prefilled, label: str, budget: int, layout: Any) -> Row:
        """The cache that the policy `label` leaves of the prefilled one."""

    def answer(
        self,
        prefilled: Prefilled,
        rows: Sequence[Row],
        question: Sequence[int],
        max_new_tokens: int,
    ) -> Answers:
        """Asks all rows the same question in one batch, and decodes them greedily."""

    def versions(self) -> Mapping[str, str]:
        """Of what can change a result."""
