"""Sampling against NumPy definitions, and the decode loop: ends, rows, streams."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Sampling
from kvjax.generation import sample
from tests import tiny
from tests.tiny import LENGTHS

LOGITS = np.array([2.0, -1.0, 0.5, 1.9, -3.0, 0.0, 1.0], np.float32)
DRAWS = 20_000


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.quick_compilation():
        yield


def probabilities(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """The distribution of the next token, from the definitions."""
    weights = np.exp(LOGITS.astype(np.float64) / temperature)
    order = np.argsort(-weights, kind="stable")
    if top_k:
        weights[order[top_k:]] = 0
    weights /= weights.sum()
    mass, nucleus = 0.0, []
    for token in order:
        if mass < top_p and weights[token] > 0:
            nucleus.append(token)
            mass += weights[token]
    filtered = np.zeros_like(weights)
    filtered[nucleus] = weights[nucleus]
    return filtered / filtered.sum()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 1.0, "top_k": 100},
        {"temperature": 1.0, "top_p": 0.3},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 2.0, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 4, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 1e-6},
    ],
)
def test_tokens_follow_the_filtered_softmax(options):
    rows = jnp.broadcast_to(jnp.asarray(LOGITS), (DRAWS, 7))
    tokens = np.asarray(sample(rows, Sampling(**options), jax.random.key(3)))
    wanted = probabilities(**options)
    found = np.bincount(tokens, minlength=7) / DRAWS
    assert (found[wanted == 0] == 0).all()
    spread = np.sqrt(wanted * (1 - wanted) / DRAWS)
    np.testing.assert_allclose(found, wanted, atol=5 * spread.max() + 1e-9)


def test_greedy_takes_the_largest_and_the_first_of_equals():
    logits = jnp.array([[0.0, 3.0, 1.0], [2.0, 2.0, 1.0], [-1.0, -5.0, -0.5]])
    np.testing.assert_array_equal(sample(logits, Sampling()), [1, 0, 2])


@pytest.mark.parametrize("temperature", [1e-30, 1e-6])
def test_a_vanishing_temperature_is_greedy(temperature):
    rows = jnp.broadcast_to(jnp.asarray(LOGITS), (64, 7))
    tokens = sample(rows, Sampling(temperature=temperature, top_p=0.9), jax.random.key(0))
    np.testing.assert_array_equal(tokens, 0)


def test_the_same_key_draws_the_same_tokens_and_another_does_not():
    rows = jnp.broadcast_to(jnp.asarray(LOGITS), (64, 7))
    draw = [np.asarray(sample(rows, Sampling(temperature=1), jax.random.key(k))) for k in (1, 1, 2)]
    np.testing.assert_array_equal(draw[0], draw[1])
    assert (draw[0] != draw[2]).any()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"top_k": -2}, "top_k -2"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"top_p": float("nan")}, "top_p nan"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        Sampling(**options)


def test_sampling_without_a_key_is_refused():
    with pytest.raises(ValueError, match="key"):
        sample(jnp.zeros((1, 4)), Sampling(temperature=1.0))
    logits, cache = tiny.full()
    with pytest.raises(ValueError, match="key"):
        kvjax.generate(
            tiny.model(), cache, logits, max_new_tokens=2, sampling=Sampling(temperature=1.0)
        )


NEW = 12


def decoded(**options):
    logits, cache = tiny.full()
    return kvjax.generate(tiny.model(), cache, logits, max_new_tokens=NEW, **options)


@pytest.fixture(scope="module")
def endless():
    return decoded()


def test_every_row_ends_at_the_first_of_several_end_tokens(endless):
    tokens = np.asarray(endless.tokens)
    ends = {int(tokens[0, 3]), int(tokens[1, 5])}
    out = decoded(end_tokens=ends)
    for row in range(3):
        stops = [at for at in range(NEW) if int(tokens[row, at]) in ends]
        length = stops[0] if stops else NEW
        assert int(out.lengths[row]) == length
        assert bool(out.finished[row]) == bool(stops)
        np.testing.assert_array_equal(out.tokens[row, :length], tokens[row, :length])
        np.testing.assert_array_equal(out.tokens[row, length:], 0)
        assert int(out.cache.next_position[row]) == LENGTHS[row] + length
        assert (np.asarray(out.cache.lengths)[:, row] == LENGTHS[row] + length).all()
    assert bool(out.finished[0])
    assert bool(out.finished[1])


def test_a_finished_row_changes_no_more(endless):
    end = int(np.asarray(endless.tokens)[1, 0])  # row 1 ends at once
    out = decoded(end_tokens=[end])
    _, cache = tiny.full()
    assert bool(out.finished[1])
    assert int(out.lengths[1]) == 0
    mine, before = kvjax.take_rows(out.cache, [1]), kvjax.take_rows(cache, [1])
    jax.tree.map(np.testing.assert_array_equal, mine, before)


def test_the_cache_holds_exactly_the_tokens_that_were_generated(endless):
    """Reading the answer as a question leaves the same cache and logits."""
    _, cache = tiny.full()
    logits, read = kvjax.extend(tiny.model(), cache, endless.tokens)
    np.testing.assert_array_equal(read.positions, endless.cache.positions)
    np.testing.assert_allclose(read.keys, endless.cache.keys, atol=1e-5)
    np.testing.assert_allclose(read.values, endless.cache.values, atol=1e-5)
    np.testing.assert_allclose(logits, endless.logits, atol=1e-4)


SAMPLED = Sampling(temperature=1.3, top_k=20)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
def test_a_stream_is_the_generation_in_pieces(sampling, endless):
    key = jax.random.key(4)
    whole = decoded(sampling=sampling, key=key, end_tokens=[5])
    logits, cache = tiny.full()
    parts = list(
        kvjax.stream(
            tiny.model(),
            cache,
            logits,
            max_new_tokens=NEW,
            block=4,
            key=key,
            sampling=sampling,
            end_tokens=[5],
        )
    )
    assert len(parts) == 3
    tokens = np.concatenate([part.tokens for part in parts], axis=1)
    np.testing.assert_array_equal(tokens, whole.tokens)
    np.testing.assert_array_equal(sum(part.lengths for part in parts), whole.lengths)
    np.testing.assert_array_equal(parts[-1].finished, whole.finished)
    np.testing.assert_allclose(parts[-1].logits, whole.logits, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), parts[-1].cache, whole.cache
    )


def test_a_stream_ends_when_every_row_has(endless):
    tokens = np.asarray(endless.tokens)
    logits, cache = tiny.full()
    parts = list(
        kvjax.stream(
            tiny.model(),
            cache,
            logits,
            max_new_tokens=NEW,
            block=4,
            end_tokens=sorted({int(t) for t in tokens[:, 1]}),
        )
    )
    assert len(parts) == 1
    assert np.asarray(parts[0].finished).all()


def test_the_order_and_repetition_of_end_tokens_do_not_matter(endless):
    first, second = (int(t) for t in np.asarray(endless.tokens)[0, [4, 2]])
    outs = [decoded(end_tokens=ends) for ends in ([first, second], {second, first})]
    np.testing.assert_array_equal(outs[0].tokens, outs[1].tokens)
