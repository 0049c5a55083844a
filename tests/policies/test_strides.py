"""Layers that use the scores of a layer before them."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from kvjax.cache.entries import kept_mask
from tests import tiny

LAYERS = 5
GROUPS = [0, 0, 2, 2, 4]  # whose scores a layer uses at stride 2


def kept_of(cache, seen):
    return np.stack([kept_mask(cache, seen, row) for row in range(2)])  # [B, L, K, T]


def run(policy, **options):
    return kvjax.prefill(
        tiny.model(num_layers=LAYERS), tiny.tokens(rows=2), policy=policy, budget=14,
        params=tiny.indexer(LAYERS), **options,
    )  # fmt: skip


@pytest.mark.parametrize("shared", [False, True])
def test_a_group_keeps_what_its_first_layer_would(shared):
    """Hidden states of a whole prefill do not depend on what is evicted."""
    policies = [
        tiny.policy("indexmem-no-memory", stride=stride, decode_interval=0) for stride in (1, 2)
    ]
    if shared:
        model, indexer = tiny.model(num_layers=LAYERS), tiny.indexer(LAYERS)
        _, full, seen = kvjax.observe(model, tiny.tokens(rows=2), policies=policies)
        caches = [
            kvjax.compress(model, full, seen, policy=policy, budget=14, params=indexer)
            for policy in policies
        ]
    else:
        caches = [run(policy)[1] for policy in policies]
    alone, grouped = (kept_of(cache, tiny.PROMPT) for cache in caches)
    np.testing.assert_array_equal(grouped, alone[:, GROUPS])
    assert (alone != grouped).any()


@pytest.mark.parametrize("pages", [None, 16])
def test_a_group_stays_together_while_it_goes_on_evicting(pages):
    policy = tiny.policy("indexmem-no-memory", stride=2, decode_interval=4)
    logits, cache = run(policy, pages=pages)
    out = kvjax.generate(
        tiny.model(num_layers=LAYERS), cache, logits, max_new_tokens=11, policy=policy, budget=14,
        params=tiny.indexer(LAYERS),
    )  # fmt: skip
    kept = kept_of(out.cache, tiny.PROMPT + 11)
    np.testing.assert_array_equal(kept, kept[:, GROUPS])
    assert kept.sum(axis=-1).max() <= 14 + 3 and (kept[:, 0] != kept[:, 2]).any()
    if pages is None:
        scores = np.asarray(out.cache.policy_state.slots["index_score"])
        np.testing.assert_array_equal(scores, scores[GROUPS])


def test_uneven_budgets_and_sliding_windows_are_refused_where_eviction_goes_on():
    uneven = tiny.policy("indexmem-no-memory", stride=2, allocator="pyramid", prefill="chunked")
    with pytest.raises(ValueError, match=r"has stride=2: .* allowed with uniform budgets"):
        run(uneven)
    even = tiny.policy("indexmem-no-memory", stride=2, prefill="chunked")
    with pytest.raises(ValueError, match="without sliding-window layers only"):
        tiny.prefill(tiny.tokens(), tiny.LENGTHS, tiny.QUARTER, even)
    with pytest.raises(ValueError, match="stride=0"):
        kvjax.policy("indexmem-no-memory", stride=0)
