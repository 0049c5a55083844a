"""Prefill, extend and decode of every policy against a dense decoder that masks what is gone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import decoding
from tests import oracle, tiny
from tests.tiny import CAPACITY, LENGTHS, PROMPT, QUARTER

QUESTION = np.random.default_rng(5).integers(1, 97, (3, 5)).astype(np.int32)
ASKED = np.array([5, 3, 1], np.int32)
NEW = 6
TOTAL = 64


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.quick_compilation():
        yield


def once(name: str) -> kvjax.Policy:
    """The policy, evicting once, after a whole prefill."""
    return tiny.policy(name, prefill="whole", decode_interval=0)


def prefilled(name: str, budget=QUARTER, tokens=None, lengths=LENGTHS):
    ids = tiny.tokens() if tokens is None else tokens
    return tiny.prefill(ids, lengths, budget, once(name))


def answered(cache, name="full"):
    """Logits behind the question, and six greedy tokens; `name` where its memory is read."""
    own = {"policy": once(name), "params": tiny.params(name)}
    question = (jnp.asarray(QUESTION), jnp.asarray(ASKED))
    logits, cache = kvjax.extend(tiny.model(), cache, *question, **own)
    return logits, kvjax.generate(tiny.model(), cache, logits, max_new_tokens=NEW, **own)


def sequences(generated: np.ndarray) -> np.ndarray:
    """Prompt, question and answer of each row, [B, TOTAL]."""
    rows = np.zeros((3, TOTAL), np.int32)
    for row in range(3):
        parts = (tiny.tokens()[row, : LENGTHS[row]], QUESTION[row, : ASKED[row]], generated[row])
        joined = np.concatenate(parts)
        rows[row, : len(joined)] = joined
    return rows


def oracle_logits(positions: np.ndarray, generated: np.ndarray) -> np.ndarray:
    """Dense logits [B, TOTAL, V] when only `positions` of each row's prompt are left behind it."""
    masks = [
        oracle.masked(tiny.model(), TOTAL, int(LENGTHS[row]), positions[:, row]) for row in range(3)
    ]
    return tiny.dense_logits(sequences(generated), np.stack(masks))


# Where evicted values are merged into kept ones, no mask describes the result.
DROPPING = [name for name in tiny.names() if once(name).remainder == kvjax.policies.Remainder()]


@pytest.mark.parametrize("name", DROPPING)
def test_a_quarter_of_the_cache_decodes_as_the_masked_dense_model(name):
    logits, cache = prefilled(name, LENGTHS if name == "full" else QUARTER)
    tiny.check_invariants(cache, LENGTHS)
    tiny.check_entries(cache, tiny.full()[1])
    behind_question, out = answered(cache)
    dense = oracle_logits(np.asarray(cache.positions), np.asarray(out.tokens))
    for row in range(3):
        prompt, end = LENGTHS[row] - 1, LENGTHS[row] + ASKED[row] - 1
        np.testing.assert_allclose(logits[row], dense[row, prompt], atol=1e-4)
        np.testing.assert_allclose(behind_question[row], dense[row, end], atol=1e-4)
        np.testing.assert_array_equal(
            out.tokens[row], np.argmax(dense[row, end : end + NEW], axis=-1)
        )
        np.testing.assert_allclose(out.logits[row], dense[row, end + NEW], atol=1e-4)
    np.testing.assert_array_equal(out.cache.next_position, LENGTHS + ASKED + NEW)
    np.testing.assert_array_equal(out.cache.overflowed, 0)


@pytest.mark.parametrize("name", [name for name in tiny.names() if name != "full"])
def test_entries_that_stay_fill_the_budget_and_no_more(name):
    _, cache = prefilled(name)
    filled = np.asarray(cache.lengths)
    held = np.where(tiny.model().windows[:, None, None] < 100, 0, filled).sum(axis=(0, 2))
    allowed = QUARTER * 2 * 2  # two global layers of two heads
    if type(once(name).allocator).__name__ in ("Uniform", "Ada", "WantedEntries"):
        np.testing.assert_array_equal(held, allowed)
    assert (filled.sum(axis=(0, 2)) <= QUARTER * 6 + 2 * 12).all()


@pytest.mark.parametrize("name", tiny.names())
def test_sliding_window_layers_keep_their_whole_window(name):
    _, cache = prefilled(name, LENGTHS if name == "full" else QUARTER)
    for row, head in np.ndindex(3, 2):
        window = np.arange(max(0, LENGTHS[row] - 12), LENGTHS[row])
        assert np.isin(window, tiny.kept(cache, 1, row, head)).all()


@pytest.mark.parametrize("name", tiny.names())
def test_a_row_does_not_depend_on_its_neighbours(name):
    logits, cache = prefilled(name)
    others, lengths = tiny.tokens(1).copy(), np.array([20, 31, 48], np.int32)
    others[1] = tiny.tokens()[1]
    budget = np.array([3, 8, 17], np.int32)
    other_logits, other = prefilled(name, budget, others, lengths)
    np.testing.assert_array_equal(logits[1], other_logits[1])
    mine, same = kvjax.take_rows(cache, [1]), kvjax.take_rows(other, [1])
    jax.tree.map(np.testing.assert_array_equal, mine, same)


@pytest.mark.parametrize("name", tiny.names())
def test_a_budget_of_the_whole_prompt_is_the_full_cache(name):
    logits, cache = prefilled(name, LENGTHS)
    wanted_logits, whole = tiny.full()
    np.testing.assert_allclose(logits, wanted_logits, atol=1e-5)
    np.testing.assert_array_equal(cache.positions, whole.positions)
    np.testing.assert_array_equal(cache.lengths, whole.lengths)
    tiny.check_entries(cache, whole, 1e-5)
    behind, out = answered(cache, name)
    wanted_behind, wanted = answered(whole)
    np.testing.assert_array_equal(out.tokens, wanted.tokens)
    np.testing.assert_allclose(behind, wanted_behind, atol=1e-5)
    np.testing.assert_allclose(out.logits, wanted.logits, atol=1e-5)


@pytest.fixture(scope="module")
def observed():
    policies = [once(name) for name in tiny.names()]
    ids, lengths = jnp.asarray(tiny.tokens()), jnp.asarray(LENGTHS)
    return kvjax.observe(tiny.model(), ids, lengths, policies=policies)


@pytest.mark.parametrize("name", tiny.names())
def test_compressing_a_shared_prefill_equals_a_prefill_of_ones_own(name, observed):
    logits, whole, seen = observed
    budget = LENGTHS if name == "full" else QUARTER
    wanted_logits, wanted = prefilled(name, budget)
    found = kvjax.compress(
        tiny.model(),
        whole,
        seen,
        policy=once(name),
        budget=jnp.asarray(budget),
        capacity=CAPACITY,
        params=tiny.params(name),
    )
    np.testing.assert_allclose(logits, wanted_logits, atol=1e-5)
    np.testing.assert_array_equal(found.positions, wanted.positions)
    np.testing.assert_array_equal(found.lengths, wanted.lengths)
    np.testing.assert_allclose(found.keys, wanted.keys, atol=1e-5)
    np.testing.assert_allclose(found.values, wanted.values, atol=1e-5)


# Chunked prefill: one scorer of each kind of state.
CHUNKED = ["snapkv", "h2o", "compactor"]
CHUNK = 8


def chunked(name: str, lengths=LENGTHS, budget=QUARTER):
    policy = tiny.policy(name, prefill="chunked", chunk=CHUNK, decode_interval=0)
    return tiny.prefill(tiny.tokens(), lengths, budget, policy)


@pytest.mark.parametrize("name", CHUNKED)
def test_later_chunks_never_see_what_earlier_ones_evicted(name):
    masks = np.stack([oracle.causal(tiny.model(), TOTAL)] * 3)
    for start in range(CHUNK, PROMPT + 1, CHUNK):
        lengths = np.minimum(LENGTHS, start)
        _, cache = chunked(name, lengths)
        tiny.check_invariants(cache, lengths)
        for row, layer, head in np.ndindex(3, 3, 2):
            if LENGTHS[row] >= start or start - LENGTHS[row] < CHUNK:
                gone = np.setdiff1d(np.arange(lengths[row]), tiny.kept(cache, layer, row, head))
                masks[row, layer, head, lengths[row] :, gone] = False
    logits, cache = chunked(name)
    behind, out = answered(cache)
    dense = tiny.dense_logits(sequences(np.asarray(out.tokens)), masks)
    for row in range(3):
        prompt, end = LENGTHS[row] - 1, LENGTHS[row] + ASKED[row] - 1
        np.testing.assert_allclose(logits[row], dense[row, prompt], atol=1e-4)
        np.testing.assert_allclose(behind[row], dense[row, end], atol=1e-4)
        np.testing.assert_allclose(out.logits[row], dense[row, end + NEW], atol=1e-4)


@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_within_the_budget_equal_a_whole_prefill(name):
    logits, cache = chunked(name, budget=LENGTHS)
    wanted_logits, whole = tiny.full()
    np.testing.assert_allclose(logits, wanted_logits, atol=1e-5)
    np.testing.assert_array_equal(cache.positions, whole.positions)
    tiny.check_entries(cache, whole, 1e-5)


def test_a_chunk_longer_than_the_prompt_evicts_as_a_whole_prefill():
    policy = tiny.policy("snapkv", prefill="chunked", chunk=64)
    logits, cache = tiny.prefill(tiny.tokens(), LENGTHS, QUARTER, policy)
    wanted_logits, wanted = prefilled("snapkv")
    np.testing.assert_allclose(logits, wanted_logits, atol=1e-5)
    np.testing.assert_array_equal(cache.positions, wanted.positions)
    tiny.check_entries(cache, wanted_full := tiny.full()[1], 1e-5)
    assert wanted_full.capacity == cache.capacity


def test_tokens_without_a_slot_are_counted_and_change_nothing_else():
    _, whole = tiny.full()
    extend = jax.jit(decoding.extend)
    tokens = jnp.asarray(tiny.tokens(2, 3, 20))
    logits, cache = extend(tiny.model(), whole, tokens, jnp.array([20, 20, 20]))
    np.testing.assert_array_equal(cache.overflowed, [4, 0, 0])
    np.testing.assert_array_equal(cache.next_position, LENGTHS + 20)
    np.testing.assert_array_equal(np.asarray(cache.lengths)[:, 0], CAPACITY)
    np.testing.assert_array_equal(np.asarray(cache.positions)[0, 0, 0], np.arange(CAPACITY))
    assert np.isfinite(logits).all()


def test_rows_of_zero_new_tokens_change_nothing():
    _, whole = tiny.full()
    extend = jax.jit(decoding.extend)
    before = kvjax.take_rows(whole, [1])
    _, cache = extend(tiny.model(), whole, jnp.asarray(QUESTION), jnp.array([2, 0, 1]))
    jax.tree.map(np.testing.assert_array_equal, kvjax.take_rows(cache, [1]), before)


def test_public_calls_work_inside_ones_own_jit():
    @jax.jit
    def answer(model, tokens, lengths, budget, question, asked):
        logits, cache = kvjax.prefill(
            model, tokens, lengths, policy=once("snapkv"), budget=budget, capacity=CAPACITY
        )
        logits, cache = kvjax.extend(model, cache, question, asked)
        out = kvjax.generate(model, cache, logits, max_new_tokens=NEW)
        return out.tokens, out.logits

    arrays = [jnp.asarray(a) for a in (tiny.tokens(), LENGTHS, QUARTER, QUESTION, ASKED)]
    tokens, logits = answer(tiny.model(), *arrays)
    _, wanted = answered(prefilled("snapkv")[1])
    np.testing.assert_array_equal(tokens, wanted.tokens)
    np.testing.assert_allclose(logits, wanted.logits, atol=1e-5)


def test_a_budget_as_text_inside_jit_is_refused():
    with pytest.raises(ValueError, match=r"0\.25"):
        jax.jit(lambda t, n: kvjax.prefill(tiny.model(), t, n, policy="knorm", budget=0.25))(
            jnp.asarray(tiny.tokens()), jnp.asarray(LENGTHS)
        )


def test_bfloat16_keeps_nearly_what_float32_keeps():
    _, cache = tiny.prefill(tiny.tokens(), LENGTHS, QUARTER, once("snapkv"), dtype="bfloat16")
    assert cache.keys.dtype == jnp.bfloat16
    tiny.check_invariants(cache, LENGTHS)
    _, exact = prefilled("snapkv")
    shared = [
        np.isin(tiny.kept(cache, *place), tiny.kept(exact, *place)).mean()
        for place in np.ndindex(3, 3, 2)
    ]
    assert np.mean(shared) > 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant(kvjax.Scorer):
    """The same score for every entry: only protection can tell them apart."""

    value: float = 0.0

    def score(self, observation, params, state):
        return jnp.full(observation.positions.shape, self.value, jnp.float32)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_protected_tokens_survive_equal_scores(value):
    policy = kvjax.Policy(
        name="constant",
        scorer=Constant(value=value),
        protection=kvjax.Protection(sinks=3, recent=4),
        schedule=kvjax.Schedule(prefill="chunked", chunk=8),
    )
    budget = np.array([9, 7, 5], np.int32)
    _, cache = tiny.prefill(tiny.tokens(), LENGTHS, budget, policy)
    for row, layer, head in np.ndindex(3, 3, 2):
        kept = tiny.kept(cache, layer, row, head)
        sinks = np.arange(3 if layer != 1 else 0)  # of a local layer only the window is of use
        recent = np.arange(LENGTHS[row] - min(4, budget[row] - 3), LENGTHS[row])
        assert np.isin(np.concatenate([sinks, recent]), kept).all()


def test_a_policy_that_keeps_state_is_not_extended_without_it():
    policy = tiny.policy("h2o")
    _, cache = tiny.prefill(tiny.tokens(), LENGTHS, QUARTER, policy)
    with pytest.raises(ValueError, match="state"):
        kvjax.extend(tiny.model(), cache, jnp.asarray(QUESTION), jnp.asarray(ASKED))
