"""A memory that nothing was written into, or nothing is read from, changes no bit."""

from __future__ import annotations

import pytest

import kvjax
from tests import tiny
from tests.policies.remembering import (
    CONFIGS,
    answer,
    ask,
    closed,
    memory_of,
    params,
    plain,
    prefill,
    remembering,
    same,
)
from tests.tiny import LENGTHS


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.quick_compilation():
        yield


@pytest.mark.parametrize(
    ("name", "config"), [("retention-global", CONFIGS[0]), ("snapkv", CONFIGS[1])], ids=str
)
def test_a_memory_in_which_nothing_is_written_changes_no_bit(name, config):
    policy, given = remembering(name, config), params(name, config)
    logits, cache = prefill(policy, given, LENGTHS)
    assert not any(a.any() for n, a in memory_of(cache).items() if n != "newest")
    assert (memory_of(cache)["newest"] == -1).all()
    full = kvjax.policy("full")
    wanted_logits, whole = prefill(full, None, LENGTHS)
    same((logits, cache.positions), (wanted_logits, whole.positions))
    (behind, cache), (wanted_behind, whole) = (
        ask(policy, given, cache),
        ask(full, None, whole),
    )
    same(behind, wanted_behind)
    out, wanted = answer(policy, given, behind, cache), answer(full, None, behind, whole)
    same((out.tokens, out.logits), (wanted.tokens, wanted.logits))


@pytest.mark.parametrize(
    ("config", "schedule"),
    [
        (CONFIGS[1], {"prefill": "chunked", "chunk": 16}),
        (CONFIGS[2], {"decode_interval": 3}),
    ],
    ids=str,
)
def test_a_closed_gate_is_plain_eviction(config, schedule):
    policy, given = remembering("snapkv", config, **schedule), closed(params("snapkv", config))
    bare = plain(policy)
    found, wanted = prefill(policy, given), prefill(bare, None)
    assert memory_of(found[1])["values"].any()
    found, wanted = ask(policy, given, found[1]), ask(bare, None, wanted[1])
    outs = answer(policy, given, *found), answer(bare, None, *wanted)
    for out, plain_out in (found, wanted), ((outs[0].logits, outs[0].cache), (
        outs[1].logits, outs[1].cache)):  # fmt: skip
        same(out[0], plain_out[0])
        same(out[1].keys, plain_out[1].keys)
        same(out[1].positions, plain_out[1].positions)
