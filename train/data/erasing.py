"""Contexts with spans to be erased, and the replies of one who never read them.

Seeds start where `train.data.task` starts, so that no sample is one that evaluation asks about.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from eval import haystacks
from eval.erasing.samples import ErasingSample, prompt_of
from eval.erasing.suites import ErasingRequest, make
from eval.prompt import Tokenizer
from train.data.config import ErasedConfig
from train.data.counting import word_counter
from train.data.examples import Example
from train.data.task import FIRST_SEED, SAMPLES

PREFIX, SPAN, SUFFIX, REPLY = range(4)  # what a token's `parts` says
_ATTEMPTS = 16


class ErasingSource:
    """A sample by its index, of SAMPLES different ones.

    An example is the context with its span, the question and the answer, one after the other; the
    answer is to be predicted, but no end behind it, as a text that is quoted ends anywhere. Suite,
    haystack, length and span length are drawn evenly.

    Raises:
      ValueError: lengths of which no sample can be made in `most` tokens.
    """

    def __init__(self, config: ErasedConfig, tokenizer: Tokenizer, most: int):
        self._config, self._tokenizer, self._most = config, tokenizer, most
        self._count = word_counter(tokenizer.encode)
        self._haystacks = [haystacks.load(name) for name in config.haystacks]
        self._inserted = [haystacks.load(name) for name in config.inserted or config.haystacks]
        texts = [stack.sha256[:16] for stack in (*self._haystacks, *self._inserted)]
        described = dataclasses.replace(config, weight=1.0, haystacks=(), inserted=())
        self.identity = f"{described} on {', '.join(texts)}, {most}"
        self[0]  # bad lengths are noticed at the door

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Example:
        problem = ""
        for attempt in range(_ATTEMPTS):
            seed = FIRST_SEED + attempt * SAMPLES + index
            try:
                example = self._example(self.sample(seed))
            except ValueError as error:
                problem = str(error)
                continue
            if len(example["tokens"]) <= self._most:
                return example
            problem = f"a sample has {len(example['tokens'])} tokens, rows {self._most}"
        raise ValueError(f"sample {index} was not made in {_ATTEMPTS} draws: {problem}")

    def sample(self, seed: int) -> ErasingSample:
        """The sample itself."""
        rng = random.Random(f"train/{seed}")
        config = self._config
        return make(
            ErasingRequest(
                suite=rng.choice(config.erase),
                haystack=rng.choice(self._haystacks),
                inserted=rng.choice(self._inserted),
                length=rng.randint(*config.lengths),
                span_tokens=rng.randint(*config.span_tokens),
                seed=seed,
                count_tokens=self._count,
            )
        )

    def _example(self, sample: ErasingSample) -> Example:
        prompt = prompt_of(sample, self._tokenizer)
        tokens = [*prompt.context, *prompt.question, *prompt.answer]
        (start, stop), context = prompt.spans[0], len(prompt.context)
        parts = np.full(len(tokens), REPLY, np.int32)
        parts[:start], parts[start:stop], parts[stop:context] = PREFIX, SPAN, SUFFIX
        targets = np.arange(len(tokens)) >= context + len(prompt.question)
        return Example(tokens=np.asarray(tokens, np.int32), targets=targets, parts=parts)
