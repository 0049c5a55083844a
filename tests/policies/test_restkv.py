"""ReST-KV against its definition and against what it claims to compute."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.removal_error.blockwise import (
    attention_output,
    by_slot_blocks,
    error_of,
    odds,
)
from kernels_pallas.select import keep_mask
from kvjax.policies import Observation, policy
from kvjax.policies.reconstruction import output_factor
from kvjax.policies.restkv import ReSTKV
from kvjax.policies.smoothing import (
    attention_drift,
    drift_kernel,
    mean_places,
    query_weights,
    shifted_average,
    slot_order,
)
from tests.policies import golden_output
from tests.policies.observations import make_observation, mirror, one_row, with_garbage
from tests.policies.scoring import assert_close, fresh_state, scores_of

WINDOW, BUDGET = 6, 14
LAYERS = {
    "full": {},
    "ragged": {"lengths": [41, 13]},
    "shorter_than_window": {"lengths": [3, 1]},
    "holes": {"lengths": [41, 20], "holes": 0.3},
    "cached": {"cached": 16, "lengths": [25, 4], "holes": 0.2},
    "one_query_per_head": {"num_heads": 2, "lengths": [41, 13]},
    "three_queries_per_head": {"num_heads": 6, "lengths": [41, 23], "holes": 0.1},
    "wider_than_the_model": {"num_heads": 6, "hidden_size": 5},
    "bfloat16": {"dtype": jnp.bfloat16, "lengths": [41, 23]},
}
OPTIONS: dict[str, dict[str, object]] = {
    "published": {},
    "drifting": {"beta": 0.7, "k_min": 3},
    "released_code": {"beta": 0.9, "k_min": 3, "rule": "released_code"},
    "beta_fraction": {"beta_fraction": 1 / 32, "k_min": 1},
    "query": {"granularity": "query", "beta": 1.0},
    "query_max": {"granularity": "query", "reduction": "max", "beta": 1.0},
    "before": {"mode": "before", "beta": 1.5},
    "before_query": {"mode": "before", "granularity": "query", "use_wo": False},
    "no_wo": {"use_wo": False},
    "tau": {"tau": 2.0, "k_min": 1},
    "tau_query": {"tau": 0.5, "granularity": "query"},
    "avg": {"spatial": "avg", "k_min": 7},
    "max": {"spatial": "max"},
}


def observed(seed: int = 1, **options: object) -> Observation:
    settings = {"slots": 41, "window": WINDOW} | options
    observation = make_observation(seed, **settings)
    batch = observation.next_position.shape[0]
    return dataclasses.replace(observation, budget=jnp.full(batch, BUDGET, jnp.int32))


def assert_defined(observation: Observation, options: dict[str, object]) -> None:
    scores = scores_of(ReSTKV(window=WINDOW, **options), observation)
    expected = [
        golden_output.restkv(mirror(observation, row), budget=BUDGET, window=WINDOW, **options)
        for row in range(len(scores))
    ]
    assert_close(scores, np.array(expected), observation.valid)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("options", ["published", "drifting", "before"])
def test_scores_are_those_of_the_definition(layer: str, options: str) -> None:
    assert_defined(observed(**LAYERS[layer]), OPTIONS[options])


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_is_that_of_the_definition(options: str) -> None:
    assert_defined(observed(2, lengths=[41, 25], num_heads=4, holes=0.1), OPTIONS[options])


def test_removing_one_entry_changes_the_output_by_exactly_the_score() -> None:
    rng = np.random.default_rng(0)
    logits, values = rng.normal(size=(3, 20)) * 2, rng.normal(size=(20, 8))
    projection = rng.normal(size=(3, 8, 32))
    weights = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    full = np.einsum("hs,sd,hde->e", weights, values, projection)
    change = []
    for removed in range(20):
        left = np.delete(np.arange(20), removed)
        again = np.exp(logits[:, left])
        again /= again.sum(1, keepdims=True)
        change.append(
            np.linalg.norm(full - np.einsum("hs,sd,hde->e", again, values[left], projection))
        )
    weights, values = (
        jnp.asarray(weights[None, None], jnp.float32),
        jnp.asarray(values[None, None], jnp.float32),
    )
    valid = jnp.ones((1, 1, 20), bool)
    factor = output_factor(jnp.asarray(projection, jnp.float32), 1)
    outputs = attention_output(weights, values, valid)
    score = error_of(odds(weights), outputs, values, valid, factor, joint=True)
    np.testing.assert_allclose(score[0, 0], change, rtol=2e-5)


def test_removing_a_set_changes_the_output_by_the_sum_of_its_members_over_what_stays() -> None:
    rng = np.random.default_rng(1)
    logits, values = rng.normal(size=24), rng.normal(size=(24, 8))
    weights = np.exp(logits) / np.exp(logits).sum()
    output = weights @ values
    removed = rng.permutation(24)[:9]
    left = np.setdiff1d(np.arange(24), removed)
    again = np.exp(logits[left]) / np.exp(logits[left]).sum()
    moved = weights[removed] @ (values[removed] - output)
    np.testing.assert_allclose(
        output - again @ values[left], moved / (1 - weights[removed].sum()), atol=1e-12
    )


@pytest.mark.parametrize("granularity", ["kv", "query"])
@pytest.mark.parametrize("model", [64, 12, 5])
def test_the_factor_gives_the_norm_through_the_whole_output_projection(
    granularity: str, model: int
) -> None:
    rng = np.random.default_rng(2)
    # Directions of very different size: a factor of the Gram matrix would lose the small ones.
    projection = rng.normal(size=(6, 8, model)) * np.logspace(0, -4, 8)[:, None]
    factor = output_factor(jnp.asarray(projection, jnp.float32), 2, granularity)
    blocks = projection.reshape(2 if granularity == "kv" else 6, -1, model)
    assert factor.shape == (*blocks.shape[:2], min(blocks.shape[1], model))
    for own, block in zip(np.asarray(factor, np.float64), blocks, strict=True):
        x = np.concatenate([rng.normal(size=(50, len(own))), np.eye(len(own))])
        np.testing.assert_allclose(
            np.linalg.norm(x @ own, axis=1), np.linalg.norm(x @ block, axis=1), rtol=1e-5
        )


def test_a_factor_that_is_passed_is_used() -> None:
    observation = observed(3)
    factor = output_factor(observation.output_projection, 2)
    scorer = ReSTKV(window=WINDOW)
    usual = scores_of(scorer, observation)
    given = dataclasses.replace(observation, output_projection=None)
    np.testing.assert_allclose(
        scores_of(scorer, given, {"output_factor": factor}), usual, rtol=1e-6
    )
    assert not np.allclose(scores_of(scorer, given, {"output_factor": 2 * factor}), usual)


@pytest.mark.parametrize("present", [1, 2, 5])
def test_query_weights_unroll_the_recursion(present: int) -> None:
    positions = jnp.asarray([[-1] * (5 - present) + list(range(10, 10 + present))], jnp.int32)
    weights = np.asarray(query_weights(positions, "ema", 0.3))[0]
    rows = np.random.default_rng(0).normal(size=(5, 4))
    expected = golden_output.ema(rows[5 - present :], 0.3)
    np.testing.assert_allclose(weights @ rows, expected, atol=1e-6)
    assert np.isclose(weights.sum(), 1.0)


def smoothed(scores: np.ndarray, drift: float, beta: float, k_min: int, rule: str) -> np.ndarray:
    width, shift = drift_kernel(jnp.full((1, 1), drift), jnp.full((1, 1), beta), k_min, rule)
    entries = jnp.ones((1, 1, len(scores)), bool)
    scores = jnp.asarray(scores, jnp.float32)[None, None]
    return np.asarray(shifted_average(scores, entries, width, shift, 20))[0, 0]


def test_without_drift_smoothing_is_a_moving_average_with_repeated_ends() -> None:
    scores = np.random.default_rng(0).random(30)
    np.testing.assert_allclose(
        smoothed(scores, 0.0, 2000.0, 5, "clean"),
        np.convolve(np.pad(scores, 2, mode="edge"), np.full(5, 0.2), mode="valid"),
        rtol=1e-5,
    )


@pytest.mark.parametrize("drift", [-35.0, -20.0, -10.0, -3.0, 0.0, 3.0, 10.0, 20.0, 35.0])
@pytest.mark.parametrize("rule", ["clean", "released_code"])
def test_drift_moves_the_peak(drift: float, rule: str) -> None:
    peak = np.zeros(41)
    peak[20] = 1.0
    result = smoothed(peak, drift, 10.0, 1, rule)
    shift = {
        "clean": int(drift / 10),
        "released_code": {-35.0: -3, -20.0: -1, -10.0: 0, -3.0: 0, 0.0: 1, 3.0: 0}.get(
            drift, int(drift // 10)
        ),
    }[rule]
    centre = result @ np.arange(41) / result.sum()
    assert np.isclose(centre, 20 - shift, atol=1e-4)
    assert np.count_nonzero(result) == 2 * int(abs(drift) // 10) + 1


def test_attention_that_moves_to_earlier_entries_pulls_scores_there() -> None:
    slots, front, rear = 64, 50, 30
    weights = np.full((1, 1, 4, slots), 1e-4, np.float32)
    weights[:, :, :2, front - 2 : front + 3] = 0.1
    weights[:, :, 2:, rear - 2 : rear + 3] = 0.1
    order = slot_order(jnp.ones((1, 1, slots), bool))
    places = mean_places(jnp.asarray(weights), order, jnp.asarray([5]))
    drift = attention_drift(places, jnp.asarray([[70, 71, 72, 73]], jnp.int32))
    assert np.isclose(drift[0, 0], front - rear)
    width, shift = drift_kernel(drift, jnp.full((1, 1), 10.0), 1, "clean")
    assert (int(width[0, 0]), int(shift[0, 0])) == (5, 2)


@pytest.mark.parametrize("slots", [7, 300, 2000])
@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
def test_drift_finds_the_largest_weights_without_sorting(slots: int, share: float) -> None:
    rng = np.random.default_rng(slots)
    logits = rng.normal(size=(1, 4, 6, slots)) * 3
    weights = np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float32)
    weights /= weights.sum(-1, keepdims=True)
    valid = rng.random((1, 2, slots)) < 0.8
    weights = np.where(np.repeat(valid, 2, axis=1)[:, :, None], weights, 0.0)
    count = max(1, int(share * slots))
    places = mean_places(
        jnp.asarray(weights), slot_order(jnp.asarray(valid)), jnp.asarray([count], jnp.int32)
    )
    drift = attention_drift(places, jnp.arange(6, dtype=jnp.int32)[None])
    expected = [golden_output.drift_of(weights[0, h], valid[0, h // 2], count) for h in range(4)]
    np.testing.assert_allclose(drift[0], expected, atol=slots * 1e-3 if count >= 512 else 1e-3)


def test_drift_of_even_attention_is_zero() -> None:
    weights = jnp.full((1, 2, 4, 16), 1 / 16)
    order = slot_order(jnp.ones((1, 1, 16), bool))
    places = mean_places(weights, order, jnp.asarray([5], jnp.int32))
    drift = attention_drift(places, jnp.arange(4, dtype=jnp.int32)[None])
    np.testing.assert_array_equal(drift, 0.0)


def test_a_budget_above_the_length_keeps_everything() -> None:
    observation = observed(4, lengths=[41, 13])
    observation = dataclasses.replace(observation, budget=jnp.asarray([100, 13], jnp.int32))
    scores = scores_of(ReSTKV(window=WINDOW), observation)
    budgets = jnp.broadcast_to(observation.budget[:, None], scores.shape[:2])
    rank = (
        ReSTKV(window=WINDOW)
        .protection()
        .rank(observation.positions, observation.next_position, budgets)
    )
    keep = keep_mask(jnp.asarray(scores), rank, observation.valid, budgets)
    np.testing.assert_array_equal(keep, observation.valid)


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("kernel", [5, 21])
def test_snapkv_is_the_special_case_of_plain_attention(pooling: str, kernel: int) -> None:
    observation = observed(5, lengths=[41, 25])
    options = {"indicator": "attention", "temporal": "mean", "spatial": pooling, "k_min": kernel}
    scores = scores_of(ReSTKV(window=WINDOW, **options), observation)
    snapkv = policy("snapkv", window=WINDOW, kernel=kernel, pooling=pooling).scorer
    assert_close(scores, scores_of(snapkv, observation), observation.valid)


def test_a_much_attended_value_that_repeats_the_output_is_worth_less_than_a_rare_one() -> None:
    observation = observed(6, batch=1, num_heads=2, num_kv_heads=1)
    usual = np.ones(8, np.float32)
    values = np.tile(usual, (1, 1, 41, 1))
    values[0, 0, 7] = -3 * usual
    keys = np.zeros((1, 1, 41, 8), np.float32)
    keys[0, 0, 20], keys[0, 0, 7] = 8.0, 2.0  # 20 is attended most, 7 less
    queries = jnp.ones_like(observation.queries) * 0.1
    observation = dataclasses.replace(
        observation, keys=jnp.asarray(keys), values=jnp.asarray(values), queries=queries
    )
    plain = {"spatial": "none", "window": WINDOW, "mode": "before"}
    attention = scores_of(ReSTKV(indicator="attention", **plain), observation)[0, 0]
    reconstruction = scores_of(ReSTKV(**plain), observation)[0, 0]
    assert attention[20] > attention[7]
    assert reconstruction[7] > reconstruction[20]


@pytest.mark.parametrize("mode", ["after", "before"])
def test_attention_of_one_stays_finite(mode: str) -> None:
    observation = observed(7, batch=1)
    keys = observation.keys.at[:, :, 3].set(100.0)
    queries = jnp.full_like(observation.queries, 100.0)
    observation = dataclasses.replace(observation, keys=keys, queries=queries)
    scores = scores_of(ReSTKV(window=WINDOW, mode=mode, spatial="none"), observation)
    assert np.all(np.isfinite(scores))


def test_a_row_of_a_batch_equals_the_row_alone_and_garbage_does_not_matter() -> None:
    scorer = ReSTKV(window=WINDOW, beta=0.8)
    observation = observed(8, batch=3, lengths=[41, 17, 2], holes=0.1)
    together = scores_of(scorer, observation)
    for row in range(3):
        alone = one_row(observation, row)
        assert_close(together[row], scores_of(scorer, alone)[0], alone.valid[0], 1e-6)
    dirty = scores_of(scorer, with_garbage(observation, np.nan))
    assert_close(dirty, together, observation.valid, 1e-6)


def test_slots_are_visited_in_blocks_whatever_their_number() -> None:
    for slots in (5, 512, 513, 1400):
        source = jnp.arange(slots, dtype=jnp.float32)[None]

        def part(start: jax.Array, size: int, source: jax.Array = source) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(source, start, size, axis=-1) * 2.0

        result = by_slot_blocks(part, slots, jnp.zeros_like(source))
        np.testing.assert_array_equal(result, source * 2.0)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("alpha", 0.0),
        ("k_min", 4),
        ("beta", 0.0),
        ("beta_fraction", 1.5),
        ("window", 0),
    ],
)
def test_options_outside_what_is_allowed_are_refused(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{option}=.*allowed"):
        policy("restkv", **{option: value})


def test_the_budget_is_asked_for_where_the_smoothing_needs_it() -> None:
    observation = dataclasses.replace(observed(9), budget=None)
    with pytest.raises(ValueError, match="budget"):
        scores_of(ReSTKV(window=WINDOW, beta=1.0), observation)


def test_scores_of_every_query_and_their_drift_never_hold_the_weights_of_all() -> None:
    def temporary(window: int) -> int:
        scorer = ReSTKV(window=window, mode="before", beta=1000.0)
        observation = make_observation(
            0,
            batch=1,
            num_heads=2,
            num_kv_heads=1,
            slots=4096,
            head_dim=4,
            hidden_size=4,
            window=window,
        )
        observation = dataclasses.replace(observation, budget=jnp.asarray([512], jnp.int32))
        state = fresh_state(scorer, observation)
        lowered = jax.jit(scorer.score).lower(observation, None, state)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    a_head_and_query = 4096 * 4
    assert temporary(128) - temporary(16) < 2 * 16 * a_head_and_query
