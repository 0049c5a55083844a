"""A session is one long decode whose cache is cut between turns, and it can go back and be kept."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax import inference
from kvjax.cache.entries import entry_positions, kept_mask
from kvjax.eviction import QUERY_POSITIONS
from kvjax.models.decoder import Decoder
from kvjax.session import Session
from kvjax.turns import TurnTemplate
from tests import tiny
from tests.models.small import BASE, TEMPLATE, small_tokenizer

TOKENIZER = small_tokenizer()
CONFIG = dataclasses.replace(
    BASE, num_layers=2, windows=(), max_length=1000, vocab_size=TOKENIZER.vocab_size
)
SHORT = {"max_new_tokens": 5}


@functools.cache
def model() -> Decoder:
    return Decoder.random(CONFIG, jax.random.key(1))


def session(policy: str | kvjax.Policy = "knorm", **options: object) -> Session:
    settings = {"budget": 40, "room": 16, "chunk": 32, "system": "Be brief."} | options
    return Session(model(), TOKENIZER, policy=policy, **settings)


def entries(state: Session) -> np.ndarray:
    return np.asarray(state.cache.lengths)


# The template, taken apart


def test_the_pieces_join_to_what_the_template_renders():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    template = TurnTemplate.of(TOKENIZER, "Be brief.")
    joined = template.preface + template.turn("one", first=True)
    joined += "two" + template.closing + template.turn("three", first=False)
    assert joined == TOKENIZER.chat(messages)
    assert template.preface == TOKENIZER.chat(messages[:1], False)


LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'system' %}{% elif m.role == 'user' %}<s>[INST] "
    "{% if loop.index0 == 1 and messages[0].role == 'system' %}<<SYS>>{{ messages[0].content }}"
    "<</SYS>> {% endif %}{{ m.content | trim }} [/INST]{% else %} {{ m.content }} </s>{% endif %}"
    "{% endfor %}"
)


def test_a_template_that_puts_the_system_prompt_into_the_first_turn():
    template = TurnTemplate.of(small_tokenizer(LLAMA2), "SYS")
    assert template.preface == "<s>[INST] <<SYS>>SYS<</SYS>> "
    assert template.turn(" hi ", first=True) == "hi [/INST]"
    assert template.turn("ho", first=False) == "<s>[INST] ho [/INST]"
    assert template.closing == " </s>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("nothing of it", "0 times"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "2 times"),
        ("{% for m in messages %}{{ m.content | upper | lower }}|{% endfor %}", "0 times"),
        (TEMPLATE.replace("m.content", "m.content | replace('<', '')"), "rewrites"),
    ],
)
def test_templates_that_change_messages_are_refused(template, message):
    with pytest.raises(ValueError, match=message):
        TurnTemplate.of(small_tokenizer(template))


# Turns


def test_a_session_within_budget_equals_one_prefill_of_the_whole_conversation():
    talk = session("snapkv", budget=300)
    first = talk.send("hello there", **SHORT)
    second = talk.send("and then?", **SHORT)
    whole = session("full", budget=1.0)
    assert [whole.send("hello there", **SHORT), whole.send("and then?", **SHORT)] == [first, second]

    template = TurnTemplate.of(TOKENIZER, "Be brief.")
    one, two = talk.turns
    fresh, kept = kvjax.prefill(
        model(),
        [TOKENIZER.encode(template.preface + template.turn("hello there", first=True))],
        room=16,
    )
    answer = kvjax.generate(model(), kept, fresh, max_new_tokens=5, end_tokens=TOKENIZER.end_tokens)
    length = int(answer.lengths[0])
    assert one.answer_start + length + len(TOKENIZER.encode(template.closing)) == one.end
    assert TOKENIZER.decode(answer.tokens[0, :length].tolist()) == one.answer == first
    assert (two.start, two.end, two.answer) == (one.end, talk.tokens_seen, second)


@pytest.mark.parametrize(("policy", "pages"), [("knorm", None), ("snapkv", 8)])
def test_the_cache_is_back_at_its_budget_after_every_turn(policy, pages):
    talk = session(policy, pages=pages)
    capacity, size = talk.cache.capacity, talk.nbytes
    for text in ("x" * 150, "short", "y" * 90):
        talk.send(text, **SHORT)
        assert entries(talk).max() <= talk.budget
        assert talk.slots == talk.budget
        assert (talk.cache.capacity, talk.nbytes) == (capacity, size)
        assert talk.tokens_seen == int(talk.cache.next_position[0]) == talk.turns[-1].end
        assert int(talk.cache.overflowed[0]) == 0
        positions = np.asarray(entry_positions(talk.cache))
        kept = positions[positions >= 0]
        assert kept.max() < talk.tokens_seen
        assert (np.diff(positions, axis=-1) > 0)[positions[..., 1:] >= 0].all()
    if pages is None:
        assert capacity <= talk.budget + 16 - 1


def test_a_pinned_system_prompt_is_never_evicted():
    pinned = session("knorm")
    count = len(TOKENIZER.encode(TurnTemplate.of(TOKENIZER, "Be brief.").preface))
    free = session("knorm", pin_system=False)
    for text in ("x" * 120, "y" * 120):
        pinned.send(text, **SHORT)
        free.send(text, **SHORT)
    assert kept_mask(pinned.cache, count).all()
    assert not kept_mask(free.cache, count).all()
    assert pinned.turns[0].start == count


def test_turns_of_like_length_share_compilations():
    talk = session("knorm")
    talk.send("z" * 100, **SHORT)
    talk.send("z" * 100, **SHORT)
    compiled = (inference._extend._cache_size(), inference._generate._cache_size())
    for length, new in ((90, 3), (100, 9), (31, 1), (77, 12)):
        talk.send("z" * length, max_new_tokens=new)
    assert (inference._extend._cache_size(), inference._generate._cache_size()) == compiled


def test_answers_end_exactly_at_the_limit():
    for limit in (1, 7, 8, 9):
        talk = session("knorm")
        talk.send("hello", max_new_tokens=limit)
        turn = talk.turns[0]
        closing = len(TOKENIZER.encode(TurnTemplate.of(TOKENIZER).closing))
        assert turn.end - turn.answer_start - closing <= limit


def test_closing_the_stream_keeps_the_part_that_was_shown():
    talk = session("knorm")
    answer = talk.stream("hello", max_new_tokens=30)
    shown = [next(answer), next(answer)]
    answer.close()
    assert talk.turns[0].answer == "".join(shown)
    assert talk.tokens_seen == int(talk.cache.next_position[0])
    assert talk.send("more", **SHORT) == talk.turns[1].answer


def test_a_turn_that_fails_changes_nothing(monkeypatch):
    talk = session("knorm")
    talk.send("hello", **SHORT)
    cache, turns = talk.cache, talk.turns

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(inference, "generate", fail)
    with pytest.raises(KeyboardInterrupt):
        talk.send("again")
    assert talk.cache is cache
    assert talk.turns is turns


def test_sampling_depends_on_seed_and_position_only():
    warm = {"sampling": kvjax.Sampling(temperature=1.5), "max_new_tokens": 12}
    left, right, other = session(), session(), session(seed=1)
    assert left.send("hello", **warm) == right.send("hello", **warm)
    assert left.send("hello", **warm) != other.send("hello", **warm)


# Going back


def test_a_fork_goes_its_own_way():
    talk = session("knorm")
    talk.send("hello", **SHORT)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(talk.cache)]
    twin = talk.fork()
    twin.send("something else", **SHORT)
    assert len(talk.turns) == 1
    for leaf, old in zip(jax.tree.leaves(talk.cache), before, strict=True):
        np.testing.assert_array_equal(leaf, old)
    assert talk.send("something else", **SHORT) == twin.turns[1].answer


def test_rolling_back_an_unevicted_turn_is_as_if_it_never_was():
    talk = session("snapkv", budget=300)
    talk.send("hello", **SHORT)
    before = talk.fork()
    talk.send("never mind", **SHORT)
    missing = talk.rollback(talk.turns[1].start)
    assert not missing.any()
    assert talk.turns == before.turns
    assert talk.tokens_seen == before.tokens_seen
    np.testing.assert_array_equal(talk.cache.lengths, before.cache.lengths)
    np.testing.assert_array_equal(
        kept_mask(talk.cache, talk.tokens_seen), kept_mask(before.cache, talk.tokens_seen)
    )
    ring = np.asarray(talk.cache.policy_state.layer[QUERY_POSITIONS])
    expected = np.asarray(before.cache.policy_state.layer[QUERY_POSITIONS])
    assert ((ring == expected) | (ring == -1)).all()
    assert talk.send("go on", **SHORT) == before.send("go on", **SHORT)


def test_rollback_names_what_is_gone_and_goes_on_without_it_when_told():
    talk = session("knorm", pin_system=False)
    talk.send("x" * 100, **SHORT)
    end = talk.tokens_seen
    talk.send("y" * 100, **SHORT)
    gone = ~kept_mask(talk.cache, end)
    first = int(np.argmax(gone.any(axis=(0, 1))))
    turns, cache = talk.turns, talk.cache
    with pytest.raises(ValueError, match=f"positions {first} to .* gone from"):
        talk.rollback(end)
    assert talk.turns is turns
    assert talk.cache is cache
    np.testing.assert_array_equal(talk.rollback(end, allow_missing=True), gone.sum(axis=2))
    assert talk.tokens_seen == end == int(talk.cache.next_position[0])
    assert np.asarray(entry_positions(talk.cache)).max() < end
    assert len(talk.turns) == 1
    with pytest.raises(ValueError, match=f"0 to {end}"):
        talk.rollback(end + 1)


def test_rollback_leaves_nothing_of_what_it_removed():
    talk = session("snapkv", budget=300)
    talk.send("hello", **SHORT)
    start = talk.tokens_seen
    talk.send("secret", **SHORT)
    talk.rollback(start)
    empty = np.asarray(talk.cache.positions) < 0
    assert not np.asarray(talk.cache.keys)[empty].any()
    assert not np.asarray(talk.cache.values)[empty].any()


def test_rollback_into_a_turn_closes_it_before_the_next():
    talk = session("snapkv", budget=300)
    talk.send("hello", **SHORT)
    middle = talk.turns[0].answer_start + 2
    talk.rollback(middle)
    (turn,) = talk.turns
    assert (turn.complete, turn.end) == (False, middle)
    talk.send("next", **SHORT)
    template = TurnTemplate.of(TOKENIZER)
    opened = TOKENIZER.encode(template.closing + template.opening + "next" + template.tail)
    assert talk.turns[1].answer_start == middle + len(opened)
    talk.rollback(0)
    assert talk.turns == ()
    talk.send("hello", **SHORT)


def test_reset_forgets_everything():
    talk = session("knorm")
    first = talk.send("hello", **SHORT)
    talk.send("x" * 100, **SHORT)
    talk.reset()
    assert (talk.tokens_seen, talk.turns, talk.slots) == (0, (), 0)
    assert talk.send("hello", **SHORT) == first


# Keeping


@pytest.mark.parametrize(("policy", "pages"), [("knorm", None), ("snapkv", 8)])
def test_a_saved_session_goes_on_where_it_was(policy, pages, tmp_path):
    talk = session(policy, pages=pages)
    talk.send("x" * 60, **SHORT)
    path = talk.save(tmp_path / "talk")
    again = Session.load(path, model(), TOKENIZER, policy)
    assert again.turns == talk.turns
    assert again.send("and?", **SHORT) == talk.send("and?", **SHORT)


def test_a_session_of_something_else_is_refused(tmp_path):
    talk = session("snapkv", pages=8)
    talk.send("hello", **SHORT)
    path = talk.save(tmp_path / "talk")
    other = Decoder.random(CONFIG, jax.random.key(2))
    with pytest.raises(ValueError, match=r"model .*model "):
        Session.load(path, other, TOKENIZER, "snapkv")
    with pytest.raises(ValueError, match=r"'snapkv'.*'knorm'"):
        Session.load(path, model(), TOKENIZER, "knorm")
    with pytest.raises(ValueError, match=r"window=32.*window=8"):
        Session.load(path, model(), TOKENIZER, kvjax.policy("snapkv", window=8))
    with pytest.raises(ValueError, match="tokenizer"):
        Session.load(path, model(), small_tokenizer(LLAMA2), "snapkv")
    from kvjax.cache.storage import save_cache

    plain = save_cache(talk.cache, tmp_path / "c", model=model(), policy=talk.policy)
    with pytest.raises(ValueError, match="without a conversation"):
        Session.load(plain, model(), TOKENIZER, "snapkv")


# What cannot be


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "budget 0"),
        ({"budget": 5}, r"5 entries.*pinned.*tokens"),
        ({"room": 0}, "room 0"),
        ({"context": 1001}, "context 1001"),
        ({"policy": "nothing"}, "'nothing'"),
        ({"policy": "kvzip"}, "replays"),
    ],
)
def test_settings_that_cannot_serve_are_refused(options, message):
    if options.get("policy") == "kvzip" and "kvzip" not in kvjax.policy_names():
        pytest.skip("no replaying policy is registered")
    with pytest.raises(ValueError, match=message):
        session(**options)


def test_turns_that_cannot_be_are_refused():
    talk = session("knorm", context=60)
    for text, message in ((" \n", "empty turn"), ("x" * 80, "context of 60 tokens")):
        with pytest.raises(ValueError, match=message):
            talk.stream(text)
    with pytest.raises(ValueError, match="max_new_tokens 0"):
        talk.stream("x", max_new_tokens=0)
    assert talk.tokens_seen == 0


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_remembers_an_evicted_turn(default_model):
    system = "You are a helpful assistant."
    talk = Session(*default_model, policy="snapkv", budget=80, room=32, chunk=64, system=system)
    talk.send("The secret code is 7421. Please remember it.", max_new_tokens=24)
    assert "7421" in talk.send("What is the secret code?", max_new_tokens=24)
    assert talk.tokens_seen > talk.budget
    assert np.asarray(talk.cache.lengths).max() <= talk.budget


# A memory of what was evicted


def test_a_session_reads_what_it_forgot(tmp_path):
    policy = kvjax.policy("snapkv", window=8, remainder="memory")
    given = {"scorer": None, "memory": tiny.memory(layers=2)}
    talk = session(policy, params=given)
    start = talk.nbytes
    for text in ("x" * 150, "short"):
        talk.send(text, **SHORT)
    assert talk.nbytes == start and talk.slots == talk.budget
    memory = talk.cache.policy_state.memory
    assert np.asarray(memory["memory.values"]).any()

    path = talk.save(tmp_path / "talk")
    again = Session.load(path, model(), TOKENIZER, policy, params=given)
    assert again.send("and then?", **SHORT) == talk.fork().send("and then?", **SHORT)
    with pytest.raises(ValueError, match="learned arrays"):
        Session.load(path, model(), TOKENIZER, policy, params=given | {"memory": {}})
    with pytest.raises(ValueError, match="the memory holds evicted tokens"):
        talk.rollback(talk.turns[0].start, allow_missing=True)
    assert len(talk.turns) == 2
