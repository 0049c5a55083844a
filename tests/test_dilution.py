"""The attention on a passage is that of a decoder with every weight in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.entries import kept_mask
from kvjax.dilution import check_passage, passage_tokens, useful_mass
from kvjax.passages import token_texts
from tests import oracle, tiny
from tests.models.small import small_tokenizer

ASKED = np.array([5, 3, 1], np.int32)
QUESTION = tiny.tokens(seed=5, length=5)
USEFUL = np.random.default_rng(2).random((3, tiny.PROMPT)) < 0.3
ATOL = 2e-6


@pytest.fixture(autouse=True, scope="module")
def quick():
    with tiny.quick_compilation():
        yield


def evicted(policy: str = "knorm", **options):
    return tiny.prefill(tiny.tokens(), tiny.LENGTHS, tiny.QUARTER, tiny.policy(policy), **options)[
        1
    ]


def measured(cache, useful=USEFUL, lengths=ASKED):
    return np.asarray(useful_mass(tiny.model(), cache, QUESTION, lengths, useful))


@jax.jit
def softmax_weights(tokens, visible):
    """[L, H, T, T] of one sequence, from the mask [L, K, T, T] of who sees whom."""
    model = tiny.model()
    group = model.config.num_heads // model.config.num_kv_heads
    rotation = model.rotation(jnp.arange(len(tokens))[None])

    def body(x, inputs):
        layer, seen = inputs
        new = layer.project(x, *rotation)
        keys, values = (jnp.repeat(a, group, axis=1)[0] for a in (new.keys, new.values))
        logits = jnp.einsum("hqd,hsd->hqs", new.queries[0], keys) / np.float32(8**0.5)
        logits = jnp.where(jnp.repeat(seen, group, axis=0), logits, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1)
        return layer.finish(x, jnp.einsum("hqs,hsd->hqd", weights, values)[None]), weights

    return jax.lax.scan(body, model.embed(tokens[None]), (model.layers, visible))[1]


def brute_force(row: int, asked: int, positions: np.ndarray) -> np.ndarray:
    """[L, H, asked, T]: weights of the question when only `positions` [L, K, S] stayed."""
    prompt = int(tiny.LENGTHS[row])
    tokens = np.zeros(tiny.PROMPT + 5, np.int32)
    tokens[:prompt] = tiny.tokens()[row, :prompt]
    tokens[prompt : prompt + asked] = QUESTION[row, :asked]
    visible = oracle.masked(tiny.model(), len(tokens), prompt, positions)
    return np.asarray(softmax_weights(tokens, visible))[:, :, prompt : prompt + asked]


@pytest.mark.parametrize("pages", [None, 4])
@pytest.mark.parametrize("policy", ["full", "knorm"])
def test_the_mass_is_that_of_the_dense_softmax(policy, pages):
    cache = tiny.full()[1] if policy == "full" else evicted(policy)
    found = measured(evicted(policy, pages=pages) if pages else cache)
    assert found.shape == (3, 3, 4)
    for row, (prompt, asked) in enumerate(zip(tiny.LENGTHS, ASKED, strict=True)):
        weights = brute_force(row, asked, np.asarray(cache.positions)[:, row])
        expected = weights[..., :prompt][..., USEFUL[row, :prompt]].sum(axis=-1).mean(axis=-1)
        np.testing.assert_allclose(found[:, row], expected, atol=ATOL)


def test_eviction_multiplies_the_odds_of_the_first_layer_as_the_theory_says():
    one = np.array([1, 1, 1], np.int32)
    whole, cut = tiny.full()[1], evicted()
    odds = []
    for cache in (whole, cut):
        share = (measured(cache, lengths=one) / measured(cache, USEFUL | True, one))[0, :2]
        odds.append((1 - share) / share)
    for row in range(2):
        prompt = int(tiny.LENGTHS[row])
        useful = USEFUL[row, :prompt]
        mass = brute_force(row, 1, np.asarray(whole.positions)[:, row])[0, :, 0, :prompt]
        kept = np.repeat(kept_mask(cut, prompt, row)[0], 2, axis=0)  # two query heads each

        def rho(where, kept=kept, mass=mass):
            return (kept * mass)[:, where].sum(axis=1) / mass[:, where].sum(axis=1)

        assert (rho(useful) > 0).all()
        np.testing.assert_allclose(
            odds[1][row], rho(~useful) / rho(useful) * odds[0][row], rtol=1e-5
        )


def test_keeping_the_passage_and_dropping_others_helps():
    useful = np.zeros((3, tiny.PROMPT), bool)
    useful[:, :4] = True
    cache = evicted("streaming")  # keeps the first four and the last
    assert (measured(cache, useful)[0, :2] >= measured(tiny.full()[1], useful)[0, :2]).all()


def test_padding_and_a_policys_state_change_nothing():
    longer = np.pad(QUESTION, ((0, 0), (0, 4)))
    cache = evicted()
    padded = useful_mass(tiny.model(), cache, longer, ASKED, np.pad(USEFUL, ((0, 0), (0, 9))))
    np.testing.assert_allclose(padded, measured(cache), atol=ATOL)
    nothing = measured(cache, lengths=np.zeros(3, np.int32))
    np.testing.assert_array_equal(nothing, np.zeros_like(nothing))
    assert np.isfinite(measured(evicted("keydiff-block"))).all()


def test_the_tokens_of_a_passage_hold_it_and_no_more():
    tokenizer = small_tokenizer()
    texts = token_texts(tokenizer, tokenizer.encode("user 日本 hello wörld, 日本 hello"))
    for passage in ("hello wö", "日本 hello w", "w", "rld,"):
        useful = passage_tokens(texts, passage)
        held = "".join(text for text, true in zip(texts, useful, strict=True) if true)
        assert passage in held
        assert len(held) <= len(passage) + 3  # merges at the ends
    assert passage_tokens(texts, "日").sum() == 3  # bytes of the last one
    with pytest.raises(ValueError, match="'absent': the prompt's tokens do not spell it"):
        passage_tokens(texts, "absent")


@pytest.mark.parametrize(
    ("passage", "message"),
    [("fox", "found 0 times"), ("aa", "found 2 times"), (" ", "empty"), ("", "empty")],
)
def test_a_passage_occurs_exactly_once(passage, message):
    check_passage("baaab", "aaa")
    with pytest.raises(ValueError, match=message):
        check_passage("baaab", passage)
