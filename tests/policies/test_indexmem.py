"""IndexMem's indexer as a policy: what it scores, when it forgets, and what stays."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.entries import kept_mask
from kvjax.learned import modules
from kvjax.learned.indexer import IndexerConfig, init_indexer
from kvjax.policies import State
from kvjax.policies.indexmem import IndexMem
from tests import tiny
from tests.policies.observations import make_observation, one_call, one_row, with_garbage
from tests.policies.scoring import fresh_state, scores_of

LOWEST = np.finfo(np.float32).min


def params():
    """One layer's indexer for `make_observation`."""
    indexer = init_indexer(
        IndexerConfig(heads=2),
        jax.random.key(0),
        num_layers=1,
        num_heads=4,
        head_dim=8,
        hidden_size=16,
    )
    return {name: array[0] for name, array in indexer.items()}


def normalised(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def definition(observation, near=0, first=0):
    """The largest score that queries from index `first` on give each token: {(row, position)}."""
    own = {name: np.asarray(array, np.float64) for name, array in params().items()}
    hidden = np.asarray(observation.hidden, np.float64)
    queries = np.asarray(observation.queries_pre_rope, np.float64)
    places = np.asarray(observation.new_positions)
    found = {}
    for b in range(len(hidden)):
        for t, s in np.ndindex(places.shape[1], places.shape[1]):
            if (
                s < first
                or min(places[b, s], places[b, t]) < 0
                or places[b, s] - near < places[b, t]
            ):
                continue
            q = (queries[b, :, s].reshape(-1) @ own["wq"]).reshape(2, 8)
            k = normalised(hidden[b, t] @ own["wk"], own["k_norm"])
            z = np.maximum(normalised(q, own["q_norm"]) @ k, 0)
            score = hidden[b, s] @ own["wg"] / 4 @ z
            key = (b, int(places[b, t]))
            found[key] = max(found.get(key, -np.inf), score)
    return found


def assert_scores(scores, observation, wanted):
    positions = np.asarray(observation.positions)
    for b, k, slot in np.ndindex(positions.shape):
        if positions[b, k, slot] >= 0:
            exact = wanted.get((b, int(positions[b, k, slot])), LOWEST)
            np.testing.assert_allclose(scores[b, k, slot], exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("near", [0, 3])
def test_a_prompts_scores_are_those_of_all_its_queries_in_every_head(near):
    observation = make_observation(1, slots=19, lengths=[19, 11])
    scores = scores_of(IndexMem(near=near), observation, params())
    assert_scores(scores, observation, definition(observation, near))
    np.testing.assert_array_equal(scores[:, 0], scores[:, 1])


def test_heads_that_hold_different_tokens_score_a_token_alike():
    observation = make_observation(2, slots=19, lengths=[19, 11], holes=0.4)
    scores = scores_of(IndexMem(near=1), observation, params())
    assert_scores(scores, observation, definition(observation, 1))


def calls(observation, cuts, scorer):
    """The scores after each of the calls that read up to `cuts`; nothing is evicted."""
    state, begin = fresh_state(scorer, one_call(observation, 0, 0)), 0
    for end in cuts:
        seen = one_call(observation, begin, end)
        state = extended(state, seen, end - begin, scorer)
        begin = end
        yield seen, state, np.asarray(scorer.score(seen, params(), state))


def extended(state, seen, count, scorer):
    """The state after one more call of `count` tokens."""
    new = fresh_state(scorer, seen)
    slots = {
        name: jnp.concatenate([state.slots[name], array[:, :, array.shape[2] - count :]], axis=2)
        for name, array in new.slots.items()
    }
    return scorer.update(seen, params(), State(slots=slots, layer=state.layer))


def test_queries_of_many_calls_count_like_those_of_one():
    observation, scorer = make_observation(3, slots=20, lengths=[20, 13]), IndexMem(near=2)
    *_, (seen, _, scores) = calls(observation, [6, 7, 15, 20], scorer)
    assert_scores(scores, seen, definition(observation, 2))


def test_after_entries_have_left_a_row_only_later_queries_count():
    observation, scorer = make_observation(4, slots=20), IndexMem(near=0)
    *_, (_, state, _) = calls(observation, [12], scorer)
    kept = np.array([0, 3, 4, 7, 11])  # of row 0; row 1 keeps everything
    slots = np.array([*kept, *[12] * 7])
    gone = np.arange(12) >= len(kept)

    def compacted(array, fill):
        moved = jnp.take(array[:, :, :12], jnp.minimum(slots, 11), axis=2)
        where = jnp.asarray(gone).reshape(1, 1, -1, *[1] * (array.ndim - 3))
        moved = jnp.where(where, jnp.asarray(fill, array.dtype), moved)
        return jnp.concatenate([moved[:1], array[1:, :, :12]], axis=0)

    later = one_call(observation, 12, 20)
    positions = jnp.concatenate(
        [compacted(observation.positions, -1), observation.positions[:, :, 12:]], axis=2
    )
    later = dataclasses.replace(later, positions=positions)
    state = State(
        slots={name: compacted(array, 5.0) for name, array in state.slots.items()},
        layer=state.layer,
    )
    state = extended(state, later, 8, scorer)
    scores = np.asarray(scorer.score(later, params(), state))
    of_later, of_all = definition(observation, first=12), definition(observation)
    assert of_later != of_all
    assert_scores(scores[:1], one_row(later, 0), of_later)
    wanted = {(0, place): value for (row, place), value in of_all.items() if row == 1}
    assert_scores(scores[1:], one_row(later, 1), wanted)


@pytest.mark.parametrize("garbage", [3e4, np.nan])
def test_what_empty_slots_and_padding_hold_does_not_matter(garbage):
    observation = make_observation(5, slots=21, lengths=[21, 9], holes=0.3)
    valid = np.asarray(observation.valid)
    clean = scores_of(IndexMem(), observation, params())
    hostile = scores_of(IndexMem(), with_garbage(observation, garbage), params())
    np.testing.assert_array_equal(clean[valid], hostile[valid])


def test_a_row_of_a_batch_equals_the_row_alone():
    observation = make_observation(6, batch=3, slots=21, lengths=[21, 9, 1])
    together = scores_of(IndexMem(), observation, params())
    for row in range(3):
        alone = one_row(observation, row)
        valid = np.asarray(alone.valid)[0]
        found = scores_of(IndexMem(), alone, params())[0]
        np.testing.assert_allclose(together[row][valid], found[valid], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prefill", ["whole", "chunked"])
@pytest.mark.parametrize("pages", [None, 16])
def test_all_heads_of_a_layer_keep_the_same_tokens_while_decoding(prefill, pages):
    policy = tiny.policy("indexmem-no-memory", prefill=prefill, chunk=16, decode_interval=4)
    model, indexer, prompt = tiny.model(num_layers=2), tiny.indexer(2), tiny.tokens(rows=2)
    options = {"policy": policy, "budget": 14, "params": indexer}
    logits, cache = kvjax.prefill(model, prompt, **options, pages=pages)
    for steps in (0, 11):
        if steps:
            out = kvjax.generate(model, cache, logits, max_new_tokens=steps, **options)
            cache = out.cache
        seen = prompt.shape[1] + steps
        kept = np.stack([kept_mask(cache, seen, row) for row in range(2)])
        np.testing.assert_array_equal(kept[:, :, 0], kept[:, :, 1])
        assert kept[..., :4].all() and kept[..., -2:].all()
        counts = kept.sum(axis=-1)
        assert counts.min() >= 14 and counts.max() <= 14 + 3


def test_a_prompt_within_its_budget_is_untouched():
    policy = tiny.policy("indexmem-no-memory")
    _, cache = tiny.prefill(tiny.tokens(), tiny.LENGTHS, tiny.LENGTHS, policy)
    np.testing.assert_array_equal(
        cache.lengths, np.broadcast_to(tiny.LENGTHS[None, :, None], cache.lengths.shape)
    )


def test_a_slot_costs_an_index_key_and_a_score():
    model = tiny.model()
    kept = [
        kvjax.prefill(
            model,
            tiny.tokens(rows=1),
            policy=tiny.policy("indexmem-no-memory", decode_interval=interval),
            budget=12,
            capacity=32,
            params=tiny.indexer(),
        )[1]
        for interval in (0, 4)
    ]
    slots = 3 * 2 * 32
    assert kvjax.nbytes(kept[1]) - kvjax.nbytes(kept[0]) == slots * 4 * (8 + 1) + 3 * 4


def card(tmp_path, model, **options):
    config = IndexerConfig(**options)
    indexer = init_indexer(
        config, jax.random.key(0), num_layers=3, num_heads=4, head_dim=8, hidden_size=32
    )
    modules.save_module(
        tmp_path,
        indexer,
        modules.Card(
            module="indexmem-no-memory",
            kind="indexer",
            options=dataclasses.asdict(config),
            backbone="tiny",
            fingerprints=modules.fingerprints(model),
        ),
    )


def test_a_module_brings_its_own_size_and_distance(tmp_path):
    model = tiny.model()
    card(tmp_path, model, size=11, near=3, activation="identity")
    policy, indexer = kvjax.load_policy(tmp_path, model)
    assert (policy.scorer.size, policy.scorer.near) == (11, 3)
    assert policy.protection == kvjax.Protection(sinks=4, recent=3)
    _, cache = kvjax.prefill(model, tiny.tokens(rows=1), policy=policy, budget=12, params=indexer)
    assert cache.policy_state.slots["index_key"].shape[-1] == 11
    with pytest.raises(ValueError, match=r"has size=8, its indexer was trained with 11: give"):
        kvjax.policy_params(model, kvjax.policy("indexmem-no-memory", path=str(tmp_path)))
    named = kvjax.policy(
        "indexmem-no-memory", path=str(tmp_path), size=11, near=3, activation="identity"
    )
    assert named == policy
    with pytest.raises(ValueError, match="of kind 'indexer'; needed is 'retention'"):
        kvjax.policy_params(model, kvjax.policy("retention-local", path=str(tmp_path)))


def test_without_an_indexer_it_says_where_one_comes_from():
    model = tiny.model()
    with pytest.raises(ValueError, match=r"kvjax\.policy_params\(model, policy\)"):
        kvjax.prefill(model, tiny.tokens(rows=1), policy="indexmem-no-memory", budget=9)
    with pytest.raises(
        FileNotFoundError, match=r"they ship for smollm2-135m-instruct\).*path=DIRECTORY"
    ):
        kvjax.policy_params(model, "indexmem-no-memory")


@pytest.mark.parametrize("options", [{"near": -1}, {"size": 0}, {"activation": "gelu"}])
def test_bad_options_are_refused(options):
    with pytest.raises(Exception, match=r"near=-1|size=0|gelu"):
        kvjax.policy("indexmem-no-memory", **options)
