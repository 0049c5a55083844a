"""What distinguishes the methods from one another: defaults, state, shared sets, calibration."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.select import keep_mask
from kvjax.policies import Policy, State, describe, duoattention, options, policy, qfilters
from kvjax.policies.sharing import sum_over_heads
from tests.policies.observations import make_observation, mirror, one_call, rotate
from tests.policies.scoring import scores_of

# name: sinks, recent, decode interval
PUBLISHED = {
    "random": (4, 0, None),
    "streaming": (4, 0, 1),
    "knorm": (0, 0, None),
    "keydiff": (0, 0, None),
    "keydiff-block": (0, 0, 128),
    "h2o": (0, 0.5, 1),
    "tova": (0, 0, 1),
    "snapkv": (0, 32, None),
    "lagkv": (4, 128, None),
    "chunkkv": (0, 32, None),
    "rkv": (0, 8, 128),
    "qfilters": (4, 0, None),
    "leverage": (4, 0, None),
    "compactor": (8, 4, None),
    "duoattention": (128, 256, None),
}


def kept(built: Policy, scores: jax.Array, observation, budget: int) -> np.ndarray:
    """[B, K, S] bool after one eviction to `budget` entries per head."""
    budgets = jnp.full(scores.shape[:1], budget, jnp.int32)
    per_head = jnp.broadcast_to(budgets[:, None], scores.shape[:2])
    rank = built.protection.rank(observation.positions, observation.next_position, per_head)
    per_head = built.allocator.head_budgets(scores, observation.valid, rank, budgets)
    return np.asarray(keep_mask(scores, rank, observation.valid, per_head))


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_the_published_ones(name: str) -> None:
    built = policy(name)
    assert built.name == name
    assert (built.protection.sinks, built.protection.recent) == PUBLISHED[name][:2]
    assert built.schedule.decode_interval == PUBLISHED[name][2]
    assert hash(built) == hash(policy(name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_common_options_override_the_method(name: str) -> None:
    built = policy(name, sinks=2, recent=3, prefill="chunked", chunk=64, decode_interval=16)
    assert (built.protection.sinks, built.protection.recent) == (2, 3)
    assert built.schedule.prefill == "chunked"
    assert (built.schedule.chunk, built.schedule.decode_interval) == (64, 16)
    # Names that every policy takes would never reach a method.
    assert not {"sinks", "recent", "prefill", "chunk", "decode_interval"} & set(options(name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_docstrings_say_what_a_reader_needs(name: str) -> None:
    text = describe(name)
    assert "Default" in text
    assert "arXiv" in text or name == "random"


def test_block_keydiff_reads_the_prompt_in_chunks() -> None:
    schedule = policy("keydiff-block").schedule
    assert (schedule.prefill, schedule.chunk) == ("chunked", 128)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("tova", {"window": 8}),
        ("snapkv", {"window": 0}),
        ("snapkv", {"kernel": 4}),
        ("chunkkv", {"kernel": 4}),
        ("rkv", {"kernel": 4}),
        ("rkv", {"lam": 2.0}),
        ("chunkkv", {"chunk_size": 0}),
        ("lagkv", {"lag": 1}),
        ("leverage", {"sketch": 0}),
        ("leverage", {"ridge": 0.0}),
        ("compactor", {"chunk_size": 0}),
        ("duoattention", {"sparsity": 1.5}),
    ],
)
def test_options_outside_their_range_are_refused(name: str, option: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        policy(name, **option)


def test_pyramidkv_is_snapkv_with_more_entries_in_lower_layers() -> None:
    built = policy("pyramidkv", window=4, kernel=7, pooling="max", beta=10)
    assert built.scorer == policy("snapkv", window=4, kernel=7, pooling="max").scorer
    assert (built.protection.sinks, built.protection.recent) == (0, 4)
    budgets = built.allocator.layer_budgets(
        jnp.asarray([64], dtype=jnp.int32), jnp.asarray([1000], dtype=jnp.int32), 6
    )
    assert np.all(np.diff(np.asarray(budgets)[:, 0]) < 0)
    assert int(budgets.sum()) == 6 * 64
    assert int(budgets[-1, 0]) == 4 + 60 // 10


def test_a_field_that_was_not_gathered_is_named() -> None:
    observation = dataclasses.replace(make_observation(2, window=1), queries=None)
    with pytest.raises(ValueError, match=r"'queries' .* Scorer\.needs"):
        scores_of(policy("tova").scorer, observation)


def test_random_scores_depend_on_the_token_and_not_on_its_slot() -> None:
    scorer = policy("random").scorer
    whole = scores_of(scorer, make_observation(1, slots=24))
    cached = make_observation(1, slots=24, cached=8, holes=0.2)
    scores = scores_of(scorer, cached)
    for b, k, s in np.argwhere(np.asarray(cached.valid)):
        token = int(cached.positions[b, k, s])
        if token < 24:
            assert scores[b, k, s] == whole[0, k, token]


def test_random_scores_are_uniform_and_differ_by_seed_layer_and_head() -> None:
    observation = make_observation(1, slots=1500, lengths=[1500, 1500])
    base = scores_of(policy("random").scorer, observation)[0]
    assert base.min() >= 0 and base.max() < 1
    counts, _ = np.histogram(base, bins=10, range=(0, 1))
    assert np.all(np.abs(counts - 300) < 75)
    seeded = scores_of(policy("random", seed=1).scorer, observation)[0]
    deeper = scores_of(
        policy("random").scorer, dataclasses.replace(observation, layer=jnp.int32(4))
    )[0]
    for other in (seeded[0], deeper[0], base[1]):
        assert abs(np.corrcoef(base[0], other)[0, 1]) < 0.1


@pytest.mark.parametrize("size", [7, 12])
def test_h2o_over_chunks_equals_h2o_over_the_whole(size: int) -> None:
    scorer = policy("h2o").scorer
    observation = make_observation(3, num_heads=6, slots=24, lengths=[24, 13])
    expected = scores_of(scorer, observation)
    rows = [mirror(observation, row) for row in range(2)]
    mass = jnp.zeros((2, 2, 0))
    for begin in range(0, 24, size):
        end = min(begin + size, 24)
        mass = jnp.pad(mass, ((0, 0), (0, 0), (0, end - begin)))
        column = np.zeros((2, 6, end))
        for b, o in enumerate(rows):
            for h in range(6):
                for t in range(begin, min(end, [24, 13][b])):
                    query = rotate(o.queries_pre_rope[h, t], np.array(t), o.rope_frequencies)
                    logits = o.keys[h // 3, : t + 1] @ query / np.sqrt(8)
                    e = np.exp(logits - logits.max())
                    column[b, h, : t + 1] += e / e.sum()
        call = dataclasses.replace(
            one_call(observation, begin, end),
            column_attention=jnp.asarray(column, dtype=jnp.float32),
        )
        state = State(slots={"attention_mass": mass})
        mass = scorer.update(call, None, state).slots["attention_mass"]
    scores = np.asarray(scorer.score(call, None, State(slots={"attention_mass": mass})))
    valid = np.asarray(observation.valid)
    np.testing.assert_allclose(scores[valid], expected[valid], rtol=1e-4)


@pytest.mark.parametrize("name", ["tova", "chunkkv"])
def test_all_heads_of_a_layer_keep_the_same_tokens(name: str) -> None:
    built = policy(name) if name == "tova" else policy(name, window=4)
    observation = make_observation(
        4, num_heads=6, num_kv_heads=3, lengths=[24, 17], window=built.window
    )
    mask = kept(built, jnp.asarray(scores_of(built.scorer, observation)), observation, 9)
    np.testing.assert_array_equal(mask.sum(-1), 9)
    np.testing.assert_array_equal(mask, np.broadcast_to(mask[:, :1], mask.shape))


def test_chunkkv_keeps_whole_chunks() -> None:
    built = policy("chunkkv", window=4, chunk_size=5)
    observation = make_observation(5, slots=44, lengths=[44, 44], window=4)
    mask = kept(built, jnp.asarray(scores_of(built.scorer, observation)), observation, 4 + 15)
    chunks = mask[:, :, :40].reshape(2, 2, 8, 5).sum(-1)
    assert np.all(mask[:, :, 40:])
    assert set(chunks.reshape(-1).tolist()) == {0, 5}


def test_sums_over_heads_follow_tokens_when_heads_hold_different_ones() -> None:
    positions = jnp.asarray([[[0, 2, 5, -1], [2, -1, 4, 5]], [[1, 2, 3, 4], [1, 2, 3, 4]]])
    scores = jnp.asarray([[[1.0, 2, 3, 99], [10, 99, 20, 30]], [[1, 2, 3, 4], [5, 6, 7, 8]]])
    np.testing.assert_array_equal(
        sum_over_heads(scores, positions),
        [[[1, 12, 33, 0], [12, 0, 20, 33]], [[6, 8, 10, 12], [6, 8, 10, 12]]],
    )


def test_lagkv_keeps_the_same_share_of_every_partition() -> None:
    built = policy("lagkv", lag=8, skip=2)
    observation = make_observation(6, slots=2 + 5 * 8 + 3)
    scores = jnp.asarray(scores_of(built.scorer, observation))
    mask = kept(built, scores, observation, 2 + 4 * 3 + 8 + 3)
    assert np.all(mask[:, :, :2]) and np.all(mask[:, :, 34:])
    np.testing.assert_array_equal(mask[:, :, 2:34].reshape(2, 2, 4, 8).sum(-1), 3)


def test_rkv_prefers_the_newest_of_equal_keys() -> None:
    scorer = policy("rkv", window=2, lam=0.0).scorer
    observation = make_observation(7, window=2, head_dim=16)
    keys = observation.keys.at[:, :, 4].set(observation.keys[:, :, 15])
    keys = keys.at[:, :, 9].set(observation.keys[:, :, 15])
    # Near-orthogonal company: nothing else is above the threshold.
    others = jnp.eye(24, 16)[None, None] * 1.0
    is_copy = jnp.isin(jnp.arange(24), jnp.asarray([4, 9, 15]))[None, None, :, None]
    keys = jnp.where(is_copy, jnp.ones_like(keys), jnp.roll(others, 1, axis=2))
    scores = scores_of(scorer, dataclasses.replace(observation, keys=keys))
    assert np.all(scores[:, :, 15] > scores[:, :, 4])
    assert np.all(scores[:, :, 15] > scores[:, :, 9])


def test_filters_are_the_principal_directions_along_the_mean_query() -> None:
    rng = np.random.default_rng(8)
    queries = rng.normal(size=(3, 4, 50, 8)) + 2 * rng.normal(size=(3, 4, 1, 8))
    filters = qfilters.calibrate(jnp.asarray(queries, dtype=jnp.float32), 2)["filters"]
    assert filters.shape == (3, 2, 8)
    for layer in range(3):
        for k in range(2):
            expected = np.zeros(8)
            for h in (2 * k, 2 * k + 1):
                direction = np.linalg.svd(queries[layer, h], full_matrices=False)[2][0]
                expected += direction * np.sign(direction @ queries[layer, h].mean(0)) / 2
            np.testing.assert_allclose(filters[layer, k], expected, rtol=0, atol=1e-4)


def test_filters_score_high_what_the_queries_attend_to() -> None:
    rng = np.random.default_rng(9)
    queries = rng.normal(size=(1, 2, 64, 8)) + 3 * rng.normal(size=(1, 2, 1, 8))
    params = qfilters.calibrate(jnp.asarray(queries, dtype=jnp.float32), 2)
    observation = make_observation(9, batch=1)
    layer = {"filters": params["filters"][0]}
    scores = scores_of(policy("qfilters").scorer, observation, layer)
    logits = np.einsum("hqd,hsd->hqs", queries[0], mirror(observation, 0).keys).mean(1)
    for k in range(2):
        assert np.corrcoef(scores[0, k], logits[k])[0, 1] > 0.9


@pytest.mark.parametrize("params", [None, {}, {"filters": jnp.ones((3, 8))}])
def test_qfilters_refuse_to_run_without_their_filters(params: object) -> None:
    with pytest.raises(ValueError, match="filters") as refusal:
        scores_of(policy("qfilters").scorer, make_observation(10), params)
    assert "\n" not in str(refusal.value)


def test_a_sketch_of_full_rank_ranks_like_exact_leverage() -> None:
    observation = make_observation(11, slots=60, head_dim=8)
    exact = scores_of(policy("leverage").scorer, observation)
    sketched = scores_of(policy("leverage", sketch=8).scorer, observation)
    assert np.all((exact >= 0) & (exact <= 1))
    np.testing.assert_allclose(exact.sum(-1), 8, atol=0.1)  # leverages sum to the rank
    for b in range(2):
        for k in range(2):
            assert np.corrcoef(exact[b, k], sketched[b, k])[0, 1] > 0.9


def test_compactor_over_chunks_equals_compactor_over_the_whole() -> None:
    scorer = policy("compactor", chunk_size=6).scorer
    observation = make_observation(12, slots=24)
    expected = scores_of(scorer, observation)
    state = State(slots={"chunk_attention": jnp.zeros((2, 2, 0))})
    for end in (12, 24):
        grown = jnp.pad(state.slots["chunk_attention"], ((0, 0), (0, 0), (0, 12)))
        call = one_call(observation, end - 12, end)
        state = scorer.update(call, None, State(slots={"chunk_attention": grown}))
    np.testing.assert_allclose(scorer.score(call, None, state), expected, rtol=0, atol=1e-4)


def test_streaming_heads_keep_sinks_and_recent_and_give_the_rest_away() -> None:
    built = policy(
        "duoattention", streaming_sinks=2, streaming_recent=3, sinks=2, recent=3, length=40
    )
    observation = make_observation(13, num_heads=8, num_kv_heads=4, slots=40, lengths=[40, 25])
    params = {"retrieval": jnp.asarray([1.0, 0.0, 0.0, 1.0])}
    scores = jnp.asarray(scores_of(built.scorer, observation, params))
    mask = kept(built, scores, observation, 20)
    streaming = [[0, 1, 37, 38, 39], [0, 1, 22, 23, 24]]
    for b in range(2):
        for head in (1, 2):
            np.testing.assert_array_equal(np.flatnonzero(mask[b, head]), streaming[b])
    # 80 entries for four heads: the retrieval heads get 35 each, and 25 where there are no more.
    np.testing.assert_array_equal(mask.sum(-1), [[35, 5, 5, 35], [25, 5, 5, 25]])


def test_heads_keep_the_class_that_their_first_call_gave_them() -> None:
    scorer = policy("duoattention", length=40).scorer
    observation = make_observation(16, num_heads=8, num_kv_heads=4, slots=24)
    state = scorer.update(
        one_call(observation, 0, 12),
        None,
        State(slots={"head_class": jnp.zeros((2, 4, 12), jnp.int8)}),
    )
    first = np.asarray(state.slots["head_class"])
    np.testing.assert_array_equal((first == 2).sum(1), 2)
    grown = jnp.pad(state.slots["head_class"], ((0, 0), (0, 0), (0, 12)))
    turned = dataclasses.replace(observation, queries_pre_rope=-observation.queries_pre_rope)
    later = scorer.update(one_call(turned, 12, 24), None, State(slots={"head_class": grown})).slots[
        "head_class"
    ]
    np.testing.assert_array_equal(later, np.repeat(first, 2, axis=2))


def test_wanted_entries_never_exceed_the_budget_nor_what_a_head_wants() -> None:
    rng = np.random.default_rng(14)
    allocator = duoattention.WantedEntries()
    wanted = rng.integers(1, 30, size=(200, 5))
    budget = rng.integers(1, 30, size=200)
    scores = np.where(np.arange(30) < wanted[..., None], 1.0, -1.0)
    given = np.asarray(
        allocator.head_budgets(
            jnp.asarray(scores, dtype=jnp.float32),
            jnp.ones(scores.shape, bool),
            jnp.zeros(scores.shape, jnp.int32),
            jnp.asarray(budget, dtype=jnp.int32),
        )
    )
    assert np.all(given <= wanted) and np.all(given >= 1)
    np.testing.assert_array_equal(given.sum(1), np.minimum(wanted.sum(1), 5 * budget))
    # Level: a head that got less than it wants is at most one entry below any other.
    short = np.where(given < wanted, given, 10**6).min(1)
    assert np.all(given.max(1) <= short + 1)
    assert allocator.largest(20, 70, 2, 4) == 70 and allocator.largest(10, 70, 2, 4) == 40


def test_head_classes_of_a_model_share_one_threshold() -> None:
    rng = np.random.default_rng(15)
    frequencies = jnp.asarray(1e4 ** (-np.arange(0, 8, 2) / 8), dtype=jnp.float32)
    queries = jnp.asarray(rng.normal(size=(3, 4, 8)), dtype=jnp.float32)
    keys = jnp.asarray(rng.normal(size=(3, 2, 8)), dtype=jnp.float32)
    area = duoattention.attention_area(queries, keys, frequencies, 60)
    classes = duoattention.calibrate(queries, keys, frequencies, sparsity=0.5, length=60)
    retrieval = np.asarray(classes["retrieval"]) > 0.5
    assert retrieval.sum() == 3
    assert np.asarray(area)[retrieval].min() > np.asarray(area)[~retrieval].max()
