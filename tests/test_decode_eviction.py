"""Eviction while decoding: the capacity is a bound at every step, and who goes is who should."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.eviction import capacity_for
from tests import oracle, tiny
from tests.simulation import Simulation
from tests.tiny import LENGTHS, QUARTER

STEPS = 9


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.quick_compilation():
        yield


def windowless() -> kvjax.Decoder:
    return tiny.model(num_layers=2)


def capacity(policy: kvjax.Policy, model: kvjax.Decoder) -> int:
    windows = [int(window) for window in model.windows]
    return capacity_for(policy, int(QUARTER.max()), tiny.PROMPT, windows, 2)


def start(policy: kvjax.Policy, model: kvjax.Decoder):
    return kvjax.prefill(
        model,
        jnp.asarray(tiny.tokens()),
        jnp.asarray(LENGTHS),
        policy=policy,
        budget=jnp.asarray(QUARTER),
        capacity=capacity(policy, model),
    )


def steps(policy: kvjax.Policy, model: kvjax.Decoder, count: int = STEPS):
    """Greedy decoding token by token: (token, logits, cache) after each."""
    logits, cache = start(policy, model)
    for _ in range(count):
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits, cache = kvjax.extend(
            model,
            cache,
            token[:, None],
            policy=policy,
            budget=jnp.asarray(QUARTER),
        )
        yield np.asarray(token), np.asarray(logits), cache


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("name", ["h2o", "tova"])
def test_kept_entries_equal_a_simulation_token_by_token(name, interval):
    policy = tiny.policy(name, decode_interval=interval)
    simulated = []
    logits, cache = start(policy, windowless())
    for row in range(3):
        simulation = Simulation(windowless(), name, int(QUARTER[row]), interval)
        wanted = simulation.prompt(tiny.tokens()[row, : LENGTHS[row]])
        np.testing.assert_allclose(logits[row], wanted, atol=1e-4)
        simulated.append(simulation)
    for token, logits, cache in steps(policy, windowless()):
        for row, simulation in enumerate(simulated):
            wanted = simulation.step(int(token[row]))
            np.testing.assert_allclose(logits[row], wanted, atol=2e-4)
            for layer, heads in enumerate(simulation.positions()):
                for head, positions in enumerate(heads):
                    found = tiny.kept(cache, layer, row, head)
                    np.testing.assert_array_equal(found, positions)


@pytest.mark.parametrize(("name", "interval"), [("streaming", 1), ("rkv", 4)])
def test_the_capacity_is_never_exceeded_not_even_for_a_step(name, interval):
    policy = tiny.policy(name, decode_interval=interval, prefill="whole")
    model = tiny.model()
    bound = max(int(QUARTER.max()), 12) + interval - 1
    for step, (_, logits, cache) in enumerate(steps(policy, model), start=1):
        assert cache.capacity == bound
        tiny.check_invariants(cache, LENGTHS + step)
        np.testing.assert_array_equal(cache.overflowed, 0)
        assert np.isfinite(logits).all()
        filled = np.asarray(cache.lengths).sum(axis=(0, 2))
        assert (filled <= 2 * layer_bounds(model, interval))[:2].all()


def test_a_row_shorter_than_the_window_stays_within_its_budget():
    policy = tiny.policy("streaming", prefill="whole")
    for _, _, cache in steps(policy, tiny.model()):
        filled = np.asarray(cache.lengths)[[0, 2]].sum(axis=(0, 2))
        assert filled[2] <= 2 * 2 * QUARTER[2]


def layer_bounds(model: kvjax.Decoder, interval: int) -> np.ndarray:
    """Entries per head, summed over layers, that each row may hold between two cuts."""
    local = np.where(model.windows < 100, model.windows, 0)
    return (np.maximum(QUARTER, local[:, None]) + interval - 1).sum(axis=0)


def test_streaming_holds_sinks_and_the_newest_at_every_step():
    policy = tiny.policy("streaming", sinks=2)
    for step, (_, _, cache) in enumerate(steps(policy, windowless()), start=1):
        for row in range(3):
            end = LENGTHS[row] + step
            recent = np.arange(end - (QUARTER[row] - 2), end)
            wanted = np.unique(np.concatenate([[0, 1], recent]))
            for layer, head in np.ndindex(2, 2):
                np.testing.assert_array_equal(tiny.kept(cache, layer, row, head), wanted)


def test_every_step_attends_to_exactly_what_the_cache_holds():
    policy = tiny.policy("h2o", decode_interval=1)
    model, total = tiny.model(), 64
    masks = np.stack([oracle.causal(model, total)] * 3)
    ids = np.zeros((3, total), np.int32)
    for row in range(3):
        ids[row, : LENGTHS[row]] = tiny.tokens()[row, : LENGTHS[row]]

    def hide(cache, seen):
        for row, layer, head in np.ndindex(3, 3, 2):
            gone = np.setdiff1d(np.arange(seen[row]), tiny.kept(cache, layer, row, head))
            masks[row, layer, head, seen[row] :, gone] = False

    hide(start(policy, model)[1], LENGTHS)
    found = []
    for step, (token, logits, cache) in enumerate(steps(policy, model)):
        seen = LENGTHS + step
        ids[np.arange(3), seen] = token
        found.append(logits)
        hide(cache, seen + 1)
    dense = tiny.dense_logits(ids, masks)
    for step, logits in enumerate(found):
        wanted = dense[np.arange(3), LENGTHS + step]
        np.testing.assert_allclose(logits, wanted, atol=1e-4)


def test_the_decode_loop_equals_single_steps():
    policy = tiny.policy("h2o", decode_interval=4)
    model = windowless()
    logits, cache = start(policy, model)
    out = kvjax.generate(
        model, cache, logits, max_new_tokens=STEPS, policy=policy, budget=jnp.asarray(QUARTER)
    )
    walked = list(steps(policy, model))
    np.testing.assert_array_equal(out.tokens, np.stack([t for t, _, _ in walked], axis=1))
    np.testing.assert_array_equal(out.cache.positions, walked[-1][2].positions)
    np.testing.assert_allclose(out.logits, walked[-1][1], atol=1e-5)
    for found, wanted in zip(
        jax.tree.leaves(out.cache.policy_state),
        jax.tree.leaves(walked[-1][2].policy_state),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_finished_row_changes_no_more_while_others_decode():
    policy = tiny.policy("h2o", decode_interval=4)
    model = windowless()
    logits, cache = start(policy, model)
    out = kvjax.generate(
        model,
        cache,
        logits,
        max_new_tokens=STEPS,
        policy=policy,
        budget=jnp.asarray(QUARTER),
        finished=jnp.array([False, True, False]),
    )
    mine, before = kvjax.take_rows(out.cache, [1]), kvjax.take_rows(cache, [1])
    jax.tree.map(np.testing.assert_array_equal, mine, before)
    np.testing.assert_array_equal(out.cache.next_position, LENGTHS + np.array([STEPS, 0, STEPS]))


def test_rows_decode_as_they_do_alone():
    policy = tiny.policy("h2o", decode_interval=4)
    model = windowless()
    logits, cache = start(policy, model)
    every = kvjax.generate(
        model, cache, logits, max_new_tokens=STEPS, policy=policy, budget=jnp.asarray(QUARTER)
    )
    for row in range(3):
        alone_logits, alone = kvjax.prefill(
            model,
            jnp.asarray(tiny.tokens()[row : row + 1]),
            jnp.asarray(LENGTHS[row : row + 1]),
            policy=policy,
            budget=jnp.asarray(QUARTER[row : row + 1]),
            capacity=capacity(policy, model),
        )
        out = kvjax.generate(
            model,
            alone,
            alone_logits,
            max_new_tokens=STEPS,
            policy=policy,
            budget=jnp.asarray(QUARTER[row : row + 1]),
        )
        np.testing.assert_array_equal(out.tokens[0], every.tokens[row])
        np.testing.assert_array_equal(out.cache.positions[:, 0], every.cache.positions[:, row])
        np.testing.assert_allclose(out.logits[0], every.logits[row], atol=1e-5)


def test_a_question_longer_than_the_free_slots_is_read_before_anything_goes():
    policy = tiny.policy("streaming", sinks=2)
    model, added = windowless(), np.array([30, 8, 1], np.int32)
    _, cache = start(policy, model)
    question = jnp.asarray(tiny.tokens(3, 3, 30))
    logits, cut = kvjax.extend(
        model,
        cache,
        question,
        jnp.asarray(added),
        policy=policy,
        budget=jnp.asarray(QUARTER),
    )
    tiny.check_invariants(cut, LENGTHS + added)
    np.testing.assert_array_equal(cut.overflowed, 0)
    for row, seen in enumerate(LENGTHS + added):
        wanted = [0, 1, *range(seen - QUARTER[row] + 2, seen)]
        np.testing.assert_array_equal(tiny.kept(cut, 0, row, 0), wanted)
    assert np.isfinite(logits).all()
