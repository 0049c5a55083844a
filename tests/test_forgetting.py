"""A session forgets a span, a text or a turn, and refuses what it cannot tell apart."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

import kvjax
from kvjax.conversation import Conversation
from kvjax.learned.eraser import EraserConfig, init_eraser
from kvjax.passages import occurrences, token_texts
from kvjax.session import Session
from tests.test_session import CONFIG, SHORT, TOKENIZER, model, session


@functools.cache
def eraser() -> kvjax.Eraser:
    made = init_eraser(EraserConfig(rank=4), jax.random.key(3), CONFIG)
    return dataclasses.replace(made, arrays={name: a + 0.05 for name, a in made.arrays.items()})


def talk(**options: object) -> Session:
    made = session("full", **options)
    made.send("the code is 7421", **SHORT)
    made.send("and the sky is blue", **SHORT)
    return made


@functools.cache
def talked() -> Session:
    return talk()


def spelled(state: Session, span: tuple[int, int]) -> str:
    return TOKENIZER.decode(list(state._conversation.tokens[slice(*span)]), False)


def test_the_record_holds_every_token_the_cache_has_seen():
    state = talked()
    tokens = state._conversation.tokens
    assert len(tokens) == state.tokens_seen == int(state.cache.next_position[0])
    whole = kvjax.prefill(model(), [list(tokens)])[1]
    held = np.asarray(state.cache.keys)[:, :, :, : len(tokens)]
    np.testing.assert_allclose(held, whole.keys, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"text": "7421"}, "7421"),
        ({"turn": 0}, "the code is 7421"),
        ({"turn": -1}, "and the sky is blue"),
        ({"text": "the", "turn": 0}, "the"),
        ({"text": "sky", "turn": 1}, "sky"),
    ],
)
def test_what_is_meant_is_found(given, text):
    state = talked().fork()
    found = state.erase(**given, method="mask")
    assert text in spelled(state, found)
    assert len(spelled(state, found)) <= len(text) + 2  # tokens that hold a neighbour as well
    assert state.erase(found, method="mask") == found
    if "turn" in given:
        turn = state.turns[given["turn"]]
        assert turn.start <= found[0] < found[1] <= turn.end


def test_a_session_erases_as_the_function_does():
    state = talked().fork()
    span = state.erase(text="7421", eraser=eraser())
    tokens = np.array([state._conversation.tokens])
    wanted = kvjax.erase(model(), eraser(), talked().cache, tokens, span)
    for a, b in zip(jax.tree.leaves(state.cache), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(state.cache.values, talked().cache.values)
    assert state.turns == talked().turns
    assert isinstance(state.send("what is the code?", **SHORT), str)


def test_after_full_recomputation_the_session_goes_on_without_the_span():
    state = talked().fork()
    start, stop = state.erase(turn=0, method="recompute")
    tokens = list(state._conversation.tokens)
    assert tokens == np.delete(talked()._conversation.tokens, np.arange(start, stop)).tolist()
    whole = kvjax.prefill(model(), [tokens])[1]
    held = np.asarray(state.cache.keys)[:, :, :, : len(tokens)]
    np.testing.assert_allclose(held, whole.keys, atol=1e-4)
    assert state.tokens_seen == int(state.cache.next_position[0]) == len(tokens)
    first, second = state.turns
    assert first.end - first.start == talked().turns[0].end - talked().turns[0].start - stop + start
    assert spelled(state, (second.start, second.answer_start)).count("sky") == 1
    state.send("go on", **SHORT)
    state.rollback(second.start)
    assert len(state.turns) == 1 and len(state._conversation.tokens) == state.tokens_seen


def test_an_evicted_session_forgets_what_is_left():
    state = session("knorm")
    state.send("x" * 60 + " the code is 7421", **SHORT)
    state.send("y" * 60, **SHORT)
    before = np.asarray(state.cache.lengths)
    state.erase(text="the code is 7421", method="mask")
    assert (np.asarray(state.cache.lengths) <= before).all()
    state.erase(text="y" * 60, eraser=eraser())
    state.send("and now?", **SHORT)
    assert int(np.asarray(state.cache.lengths).max()) <= state.budget


def test_a_saved_session_can_still_forget(tmp_path):
    path = talked().save(tmp_path / "talk")
    again = Session.load(path, model(), TOKENIZER, "full")
    assert again.erase(text="7421", method="mask") == talked().fork().erase(
        text="7421", method="mask"
    )
    raw = json.loads(json.dumps(dataclasses.asdict(talked()._conversation)))
    del raw["tokens"]  # as saved before sessions kept them
    again._conversation = Conversation.from_dict(raw)
    with pytest.raises(ValueError, match="saved without its tokens"):
        again.erase(text="7421", method="mask")


def test_an_answer_under_way_is_dropped_when_the_session_forgets():
    state = talked().fork()
    pieces = state.stream("say something", max_new_tokens=12)
    next(pieces)
    state.erase(text="7421", method="mask")
    with pytest.raises(ValueError, match="the session went on"):
        list(pieces)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text": "Rome"}, "'Rome' does not occur in tokens 0:"),
        ({"text": "the"}, r"'the' occurs 2 times, at tokens \d+:\d+, \d+:\d+: give one"),
        ({"text": "sky", "turn": 0}, "'sky' does not occur"),
        ({"text": " "}, "it is empty"),
        ({"turn": 2}, "turn 2: allowed are -2 to 1"),
        ({}, "give a span of token positions, or a text, a turn or both"),
        ({"span": (3, 9), "turn": 0}, "give a span"),
        ({"span": (3, 999)}, "span 3:999 of row 0: allowed are"),
        ({"span": (3, 9), "method": "kveraser"}, "needs an eraser"),
        ({"span": (3, 9), "method": "forget"}, "unknown erasing method"),
        ({"turn": 0, "method": kvjax.erasing_method("note", note=(5,))}, "say it in a turn"),
    ],
)
def test_what_cannot_be_forgotten_is_refused_and_nothing_changes(given, message):
    state = talked().fork()
    cache, record = state.cache, state._conversation
    with pytest.raises(ValueError, match=message) as caught:
        state.erase(**({"method": "mask"} | given))
    assert "\n" not in str(caught.value)
    assert state.cache is cache and state._conversation is record


def test_turns_that_are_not_there_or_cut():
    with pytest.raises(ValueError, match="turn 0: allowed are none, nothing was said"):
        session("full").erase(turn=0)
    state = talked().fork()
    state.rollback(state.turns[1].answer_start - 4)
    with pytest.raises(ValueError, match="turn 1 was cut by a rollback"):
        state.erase(turn=1, method="mask")


def test_tokens_that_share_a_character_belong_to_it():
    text = "a 日本 hello wörld, 日本"
    texts = token_texts(TOKENIZER, TOKENIZER.encode(text))
    first, second = occurrences(texts, "日本")
    assert first[1] - first[0] == second[1] - second[0] == 6
    assert "".join(texts[slice(*occurrences(texts, "wörld")[0])]).strip() == "wörld"
    assert occurrences(texts, "absent") == []
