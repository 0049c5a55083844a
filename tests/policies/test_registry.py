"""Names, and the options that every policy takes."""

from __future__ import annotations

import pytest

import kvjax
from kvjax.policies.allocators import Ada, Global, Uniform
from kvjax.policies.value_merging import CacheMerging


def test_a_policy_keeps_its_published_parts_unless_told_otherwise():
    published = kvjax.policy("ada-snapkv")
    changed = kvjax.policy("ada-snapkv", sinks=4, recent=8, decode_interval=16, window=48)
    assert published.protection == kvjax.Protection(sinks=0, recent=32)
    assert changed.protection == kvjax.Protection(sinks=4, recent=8)
    assert changed.schedule.decode_interval == 16
    assert changed.scorer.window == 48
    assert isinstance(changed.allocator, Ada)


def test_any_policy_takes_an_allocator_and_a_remainder_by_name_or_as_they_are():
    policy = kvjax.policy("keydiff", allocator="global", remainder="cam")
    assert policy.allocator == Global()
    assert policy.remainder == CacheMerging()
    assert kvjax.policy("cake", allocator="uniform").allocator == Uniform()
    given = kvjax.policy("keydiff", allocator=Ada(floor=0.5))
    assert given.allocator == Ada(floor=0.5)


def test_an_interval_of_zero_never_evicts_while_decoding():
    assert kvjax.policy("tova").schedule.decode_interval == 1
    assert kvjax.policy("tova", decode_interval=0).schedule.decode_interval is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"allocator": "adaptive"}, "allocator 'adaptive': allowed are uniform, pyramid, ada"),
        ({"remainder": "keep"}, "remainder 'keep': allowed are drop, cam, pivot, memory"),
        ({"memory_path": "x"}, "memory_path='x': allowed with remainder='memory'"),
        ({"sinks": -1}, "sinks=-1"),
        ({"widow": 3}, "no option 'widow'"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(options, named):
    with pytest.raises(ValueError, match=named):
        kvjax.policy("snapkv", **options)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown policy 'snapkw'; allowed: ada-snapkv, "):
        kvjax.policy("snapkw")


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="'snapkv' is registered twice"):
        kvjax.register("snapkv")(lambda: None)
