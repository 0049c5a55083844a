"""A paged cache behaves as a padded one, and its bytes follow the sum of the budgets."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import assembly, decoding
from kvjax.policies.allocators import Ada, Global
from tests import oracle

CONFIG = kvjax.ModelConfig(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=8, max_length=512,
)  # fmt: skip
LENGTHS = (50, 37)


@pytest.fixture(scope="module")
def model():
    return kvjax.Decoder.random(CONFIG, jax.random.key(1))


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 97, length).tolist() for length in LENGTHS]


def positions(cache) -> np.ndarray:
    """[L, B, K, S] of either kind of cache."""
    views = [jax.tree.map(lambda a, i=i: a[i], cache.views) for i in range(cache.num_layers)]
    return np.stack([np.asarray(cache.dense(view)[2]) for view in views])


def assert_pages_conserved(cache) -> None:
    """Every page of every row is held by exactly one head or free."""
    for row in range(cache.batch):
        held = np.asarray(cache.page_table[:, row]).reshape(-1)
        free = np.asarray(cache.free[row, : int(cache.free_count[row])])
        everything = np.concatenate([held[held >= 0], free])
        assert sorted(everything.tolist()) == list(range(cache.free.shape[1]))
        needed = -(-np.asarray(cache.lengths[:, row]) // cache.page_size)
        np.testing.assert_array_equal((np.asarray(cache.page_table[:, row]) >= 0).sum(-1), needed)


@pytest.mark.parametrize(
    "options",
    [
        {"decode_interval": 0},
        {"decode_interval": 1},
        {"decode_interval": 5},
        {"prefill": "chunked", "chunk": 16, "decode_interval": 5},
    ],
    ids=str,
)
def test_paged_and_padded_caches_give_the_same_tokens(model, prompts, options):
    policy = kvjax.policy("h2o" if options.get("chunk") else "snapkv", recent=4, **options)
    again = {}
    if policy.schedule.decode_interval:
        again = {"policy": policy, "budget": np.array([20, 15])}
    question = np.random.default_rng(1).integers(0, 97, (2, 6))
    results = []
    for pages in (None, 4):
        _, cache = kvjax.prefill(model, prompts, policy=policy, budget=0.4, room=12, pages=pages)
        logits, cache = kvjax.extend(model, cache, question, **again)
        answer = kvjax.generate(model, cache, logits, max_new_tokens=6, **again)
        if pages:
            assert_pages_conserved(cache)
            assert_pages_conserved(answer.cache)
        results.append((logits, answer.tokens, answer.cache.lengths, answer.cache.overflowed))
    padded, paged = results
    np.testing.assert_allclose(padded[0], paged[0], atol=2e-5)
    for one, other in zip(padded[1:], paged[1:], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("allocator", [Ada(floor=0.2), Global()], ids=["ada", "global"])
def test_uneven_budgets_cost_at_most_a_tenth_more_than_uniform_ones(model, allocator):
    tokens = np.random.default_rng(2).integers(0, 97, (1, 384))
    policy = kvjax.policy("snapkv", window=8, decode_interval=0)
    uneven = dataclasses.replace(policy, allocator=allocator)
    shape = {**dataclasses.asdict(CONFIG), "head_dim": 64, "rope": CONFIG.rope}
    wide = kvjax.Decoder.random(kvjax.ModelConfig(**shape), jax.random.key(1))
    # Pages of 4: at a quarter of 384 a page is the share that 16 are of a longer context.
    _, uniform = kvjax.prefill(wide, tokens, policy=policy, budget=0.25)
    _, paged = kvjax.prefill(wide, tokens, policy=uneven, budget=0.25, pages=4)
    lengths = np.asarray(paged.lengths)
    assert lengths.sum() == np.asarray(uniform.lengths).sum()
    assert lengths.max() > 1.1 * lengths.min(), "the budgets should be uneven"
    assert kvjax.nbytes(paged) <= 1.10 * kvjax.nbytes(uniform)


@pytest.mark.parametrize("allocator", [Ada(floor=0.2), Global()], ids=["ada", "global"])
def test_uneven_heads_decode_as_the_dense_mask_says(model, prompts, allocator):
    policy = kvjax.policy("snapkv", window=4, recent=4, decode_interval=0)
    policy = dataclasses.replace(policy, allocator=allocator)
    _, cache = kvjax.prefill(model, prompts, policy=policy, budget=0.3, room=8, pages=4)
    assert_pages_conserved(cache)
    kept = positions(cache)
    question = np.random.default_rng(3).integers(0, 97, (2, 5))
    logits, cache = kvjax.extend(model, cache, question)
    for row, length in enumerate(LENGTHS):
        sequence = np.concatenate([prompts[row], question[row]])
        mask = oracle.masked(model, len(sequence), length, kept[:, row])
        expected = oracle.dense_logits(model, sequence, mask)
        np.testing.assert_allclose(logits[row], expected[-1], atol=1e-4)


def test_global_budgets_add_up_and_are_cut_again_while_decoding(model, prompts):
    policy = kvjax.policy("h2o", recent=2, decode_interval=4)
    policy = dataclasses.replace(policy, allocator=Global())
    budget = np.array([10, 8])
    logits, cache = kvjax.prefill(model, prompts, policy=policy, budget=budget, pages=4)
    heads = CONFIG.num_layers * CONFIG.num_kv_heads
    np.testing.assert_array_equal(cache.lengths.sum(axis=(0, 2)), budget * heads)
    for _ in range(9):
        token = jnp.argmax(logits, axis=-1)[:, None]
        logits, cache = kvjax.extend(model, cache, token, policy=policy, budget=budget)
        total = np.asarray(cache.lengths.sum(axis=(0, 2)))
        assert (total < (budget + 4) * heads).all()
        assert_pages_conserved(cache)
        assert int(cache.overflowed.max()) == 0
    held = positions(cache)
    for head in held.reshape(-1, held.shape[-1]):
        filled = head[head >= 0]
        assert (np.diff(filled) > 0).all()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Swing(kvjax.Scorer):
    """Prefers the last layers in one stretch of the text and the first ones in the next."""

    def score(self, observation, params, state):
        rising = (observation.next_position // 8) % 2 == 0
        layer = observation.layer.astype(jnp.float32)
        base = jnp.where(rising, layer, -layer)[:, None, None] * 1000
        return base + observation.positions.astype(jnp.float32)


@pytest.mark.parametrize("budget", [17, 20, 33])
def test_a_budget_that_moves_between_layers_loses_nothing(budget):
    # A long call under which the first layers grow before the last ones shrink.
    config = dataclasses.replace(CONFIG, num_layers=4, windows=())
    model = kvjax.Decoder.random(config, jax.random.key(0))
    policy = kvjax.Policy(
        name="swing",
        scorer=Swing(),
        protection=kvjax.Protection(sinks=0),
        allocator=Global(ceiling=None),
        schedule=kvjax.Schedule(decode_interval=4),
    )
    rng = np.random.default_rng(5)
    prompt, more = (rng.integers(0, 97, (1, length)) for length in (160, 168))
    results = []
    for pages in (None, 16):
        _, cache = kvjax.prefill(model, prompt, policy=policy, budget=budget, pages=pages)
        before = np.asarray(cache.lengths)
        _, cache = kvjax.extend(model, cache, more, policy=policy, budget=budget)
        results.append(kvjax.extend(model, cache, more[:, :1], policy=policy, budget=budget)[0])
        assert (np.asarray(cache.lengths)[0] > before[0]).all(), "the first layer should grow"
    assert_pages_conserved(cache)
    np.testing.assert_allclose(*results, atol=2e-5)


def test_rows_of_a_paged_batch_are_the_rows_alone(model, prompts):
    policy = kvjax.policy("h2o", decode_interval=3)
    policy = dataclasses.replace(policy, allocator=Global())
    pages = kvjax.Pages(size=4, pool=60, per_head=12)
    together = _decoded(model, prompts, policy, pages, np.array([12, 9]))
    for row in range(2):
        alone = _decoded(model, [prompts[row]], policy, pages, np.array([[12], [9]][row]))
        np.testing.assert_array_equal(together[0][row], alone[0][0])
        np.testing.assert_array_equal(together[1][:, row], alone[1][:, 0])


def test_tokens_that_find_no_page_are_counted_and_nothing_else_is_touched(model):
    cache = assembly.empty_cache(
        model, 1, 64, pages=kvjax.Pages(size=4, pool=CONFIG.num_layers * 2, per_head=16)
    )
    tokens = np.random.default_rng(4).integers(0, 97, (1, 6)).astype(np.int32)
    _, cache = decoding.extend(model, cache, jnp.asarray(tokens), jnp.asarray([6], jnp.int32))
    # Six pages for six heads that want two each: the first three heads get theirs.
    np.testing.assert_array_equal(cache.lengths.reshape(-1), [6, 6, 6, 0, 0, 0])
    np.testing.assert_array_equal(cache.overflowed, [6])
    assert_pages_conserved(cache)
    kept = positions(cache).reshape(6, -1)[:, :6]
    np.testing.assert_array_equal(kept[:3], np.broadcast_to(np.arange(6), (3, 6)))
    assert (kept[3:] == -1).all()


def test_room_is_what_the_pool_still_holds(model):
    cache = assembly.empty_cache(model, 1, 64, pages=kvjax.Pages(size=4, pool=12, per_head=16))
    np.testing.assert_array_equal(cache.room(), [8])
    with pytest.raises(ValueError, match="9 tokens for a cache with room for 8"):
        kvjax.extend(model, cache, np.zeros((1, 9), np.int32))


def test_donated_pages_are_updated_in_place(model):
    cache = assembly.empty_cache(model, 1, 64, pages=kvjax.Pages(size=16, pool=24, per_head=4))
    step = jax.jit(decoding.extend, donate_argnums=1)
    ones = jnp.ones((1, 1), jnp.int32)
    compiled = step.lower(model, cache, ones, ones[0]).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == kvjax.nbytes(cache)


def _decoded(model, rows, policy, pages, budget):
    logits, cache = kvjax.prefill(
        model, _padded(rows), [len(row) for row in rows],
        policy=policy, budget=budget, pages=pages, capacity=48,
    )  # fmt: skip
    answer = kvjax.generate(model, cache, logits, max_new_tokens=7, policy=policy, budget=budget)
    return np.asarray(answer.tokens), np.asarray(answer.cache.lengths)


def _padded(rows) -> np.ndarray:
    tokens = np.zeros((len(rows), max(LENGTHS)), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return tokens
