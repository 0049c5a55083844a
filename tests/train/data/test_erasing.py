"""Erasing's samples as training reads them."""

from __future__ import annotations

import numpy as np
import pytest

from eval.erasing.samples import prompt_of
from tests.train.data.tokens import StableTokenizer
from train import data
from train.data.config import ErasedConfig
from train.data.erasing import PREFIX, REPLY, SPAN, SUFFIX, ErasingSource
from train.data.task import FIRST_SEED

TOKENIZER = StableTokenizer()
CONFIG = ErasedConfig(
    erase=("neighbour", "chain"), lengths=(250, 300), span_tokens=(30, 60), haystacks=("sentences",)
)


def test_an_example_is_context_question_and_answer_and_says_which_is_which():
    source = ErasingSource(CONFIG, TOKENIZER, 512)
    suites, spans = set(), set()
    for index in range(12):
        sample = source.sample(FIRST_SEED + index)
        prompt = prompt_of(sample, TOKENIZER)
        found = source[index]
        whole = [*prompt.context, *prompt.question, *prompt.answer]
        assert found["tokens"].tolist() == whole
        assert np.flatnonzero(found["targets"]).tolist() == list(
            range(len(whole) - len(prompt.answer), len(whole))
        )
        (start, stop), context = prompt.spans[0], len(prompt.context)
        parts = found["parts"]
        assert (parts[:start] == PREFIX).all() and (parts[start:stop] == SPAN).all()
        assert (parts[stop:context] == SUFFIX).all() and (parts[context:] == REPLY).all()
        suites.add(sample.suite)
        spans.add(stop - start)
    assert suites == {"neighbour", "chain"} and len(spans) > 3


def test_batches_carry_the_parts_of_every_token():
    batches = data.build((CONFIG,), TOKENIZER, length=640, batch=2, seed=0, prefetch=0)
    batch = next(batches)
    assert set(batch) == {"tokens", "segments", "positions", "labels", "parts"}
    for row in range(2):
        for document in range(batch["segments"][row].max() + 1):
            mine = batch["segments"][row] == document
            parts = batch["parts"][row][mine]
            assert (np.diff(parts) >= 0).all() and set(parts) == {PREFIX, SPAN, SUFFIX, REPLY}
            labels = batch["labels"][row][mine]
            assert labels.any() and not labels[-1] and (parts[labels] == REPLY).all()
    batches.close()


def test_they_stand_alone():
    text = data.read("data", [{"text": "README.md"}])
    with pytest.raises(ValueError, match="sources with `erase` stand beside others"):
        data.build((CONFIG, *text), TOKENIZER, length=512, batch=1, seed=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"erase": ["poem"], "lengths": 300}, r"data\[0\].erase\[0\]='poem'"),
        ({"erase": ["chain"]}, "missing key 'lengths'"),
        ({"erase": ["chain"], "lengths": 300, "span_tokens": [9, 3]}, "span_tokens"),
        ({"erase": ["chain"], "lengths": 300, "haystacks": ["poem"]}, "haystacks"),
    ],
)
def test_bad_configs_are_refused(content, message):
    with pytest.raises(ValueError, match=message):
        data.read("data", [content])


def test_lengths_of_which_nothing_can_be_made_are_noticed_at_the_door():
    short = ErasedConfig(erase=("chain",), lengths=(40, 40), span_tokens=(30, 60))
    with pytest.raises(ValueError, match="sample 0 was not made in 16 draws: length=40"):
        ErasingSource(short, TOKENIZER, 512)
    with pytest.raises(ValueError, match="tokens, rows 200"):
        ErasingSource(CONFIG, TOKENIZER, 200)
