"""What cannot be erased is refused in one line that names the value and what is allowed."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.learned.eraser import Eraser
from tests import tiny
from tests.erasing.setting import eraser, rows_of


@pytest.fixture(autouse=True)
def as_installed():
    with tiny.as_installed():
        yield


def one_row() -> kvjax.PaddedCache:
    return kvjax.take_rows(tiny.full()[1], [0])


def erase(spans, method="mask", cache=None, tokens=None, adapters=None):
    cache = one_row() if cache is None else cache
    tokens = tiny.tokens()[: cache.batch] if tokens is None else tokens
    return kvjax.erase(tiny.model(), adapters, cache, tokens, spans, method=method)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ((5, 5), "span 5:5 .*0 <= start < stop <= 48"),
        ((9, 5), "span 9:5"),
        ((-1, 5), "span -1:5"),
        ((40, 49), "span 40:49 of row 0.*48, the tokens seen"),
        ((0, 0), "span 0:0 is empty"),
        ([(3, 9), (8, 12)], "spans 3:9 and 8:12 of row 0 overlap"),
        ([(3, 9, 12)], r"span \(3, 9, 12\): allowed are pairs"),
        ([(1.5, 3.0)], "spans of dtype float64: allowed are integers"),
        ([[(3, 9)], [(3, 9)]], "spans of 2 rows: the cache has 1"),
        ([], r"span \[\]: allowed are pairs"),
        (np.zeros((1, 2), np.int32), r"spans of shape \(1, 2\): allowed is \(1, N, 2\)"),
        (np.zeros((1, 1, 2), np.float32), "spans of dtype float32"),
    ],
)
def test_bad_spans(spans, message):
    with pytest.raises(ValueError, match=message) as caught:
        erase(spans)
    assert "\n" not in str(caught.value)


def test_a_batch_needs_spans_for_each_row():
    with pytest.raises(ValueError, match="3 rows: give a list of pairs for each row"):
        erase([(3, 9)], cache=tiny.full()[1])
    with pytest.raises(ValueError, match=r"span 3:9 of row 2.*<= 7"):
        erase([[(3, 9)]] * 3, cache=tiny.full()[1])


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("forget", {}, "unknown erasing method 'forget'; allowed: kveraser, hybrid"),
        ("mask", {"tokens": 3}, "'mask' has no option 'tokens'; allowed: none"),
        ("local-repair", {"width": 3}, "no option 'width'; allowed: tokens"),
        ("local-repair", {"tokens": -1}, "tokens=-1: allowed are >= 0"),
        ("cacheblend", {"fraction": 0.0}, r"fraction=0.0: allowed are \(0, 1\]"),
        ("hybrid", {"tokens": 0}, "tokens=0"),
        ("hybrid", {"rank_by": "chance"}, "'chance': allowed are deviation, attention"),
        ("hybrid", {"reach": 0}, "reach=0"),
        ("note", {}, "needs the option 'note'"),
        ("note", {"note": ()}, "at least one"),
    ],
)
def test_bad_methods(method, options, message):
    with pytest.raises(ValueError, match=message):
        kvjax.erasing_method(method, **options)


def test_a_layer_that_the_model_does_not_have():
    for name in ("cacheblend", "hybrid"):
        with pytest.raises(ValueError, match="check_layer=3: allowed are 0 to 2"):
            erase((3, 9), kvjax.erasing_method(name, check_layer=3), adapters=eraser())


def test_a_method_without_the_eraser_it_needs():
    with pytest.raises(ValueError, match="'kveraser' needs an eraser"):
        erase((3, 9), "kveraser")


def test_an_eraser_of_another_shape():
    arrays = eraser().arrays | {"q_proj.a": jnp.zeros((3, 32, 5))}
    wrong = Eraser(config=eraser().config, arrays=arrays)
    with pytest.raises(
        ValueError, match=r"'q_proj.a' is float32 of shape \(3, 32, 5\).*\(3, 32, 4\)"
    ):
        erase((3, 9), "kveraser", adapters=wrong)


def test_tokens_that_do_not_belong_to_the_cache():
    with pytest.raises(ValueError, match="47 tokens: the cache has seen 48"):
        erase((3, 9), tokens=tiny.tokens()[:1, :47])
    with pytest.raises(ValueError, match="tokens of 3 rows: the cache has 1"):
        erase((3, 9), tokens=tiny.tokens())
    with pytest.raises(ValueError, match="token id 97: allowed are 0 to 96"):
        erase((3, 9), tokens=np.full((1, 48), 97))


def test_a_cache_of_another_model():
    other = dataclasses.replace(one_row(), keys=one_row().keys[:2], values=one_row().values[:2])
    with pytest.raises(ValueError, match="cache of another model"):
        erase((3, 9), cache=other)


def test_a_cache_that_remembers_what_was_evicted():
    half = np.array([24, 16, 4], np.int32)
    policy = tiny.policy("snapkv+memory")
    cache = tiny.prefill(tiny.tokens(), tiny.LENGTHS, half, policy)[1]
    with pytest.raises(ValueError, match="memory of evicted entries"):
        erase(rows_of(), cache=cache)


@pytest.mark.parametrize(
    ("extent", "message"),
    [
        ({"span": 5}, "extent.span=5: these spans need 6 or more"),
        ({"prefix": 2}, "extent.prefix=2: these spans need 3 or more"),
        ({"suffix": 38}, "extent.suffix=38: these spans need 39 or more"),
        ({"span": 0}, "extent.span=0: allowed are integers >= 1"),
        ({"suffix": 2.5}, "extent.suffix=2.5: allowed are integers >= 0"),
    ],
)
def test_an_extent_that_does_not_hold_the_spans(extent, message):
    with pytest.raises(ValueError, match=message):
        extent = kvjax.erasing.Extent(**{"span": 6, "prefix": 3, "suffix": 39} | extent)
        kvjax.erase(
            tiny.model(), None, one_row(), tiny.tokens()[:1], (3, 9), extent=extent, method="mask"
        )


def test_a_note_behind_a_policy_that_goes_on_evicting():
    policy = tiny.policy("h2o", decode_interval=4)
    half = np.array([24, 16, 4], np.int32)
    cache = tiny.prefill(tiny.tokens(), tiny.LENGTHS, half, policy)[1]
    with pytest.raises(ValueError, match="'note': this cache's policy goes on evicting"):
        erase(rows_of(), kvjax.erasing_method("note", note=(1,)), cache=cache)


def test_a_note_for_which_there_is_no_room():
    note = kvjax.erasing_method("note", note=(1,) * 20)
    with pytest.raises(ValueError, match="20 tokens for a cache with room for 16"):
        erase((3, 9), note)
    with pytest.raises(ValueError, match="token id 97"):
        erase((3, 9), kvjax.erasing_method("note", note=(97,)))
