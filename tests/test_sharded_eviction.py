"""Over a mesh the same entries stay, and devices tell each other numbers of entries, not scores."""

from __future__ import annotations

import json

import pytest

from tests.program import output_of
from tests.sharded_eviction import ALLOCATORS, B, K, L


@pytest.fixture(scope="module")
def found():
    """What the program with eight devices prints."""
    return json.loads(output_of("tests.sharded_eviction"))


@pytest.mark.parametrize("name", ALLOCATORS)
def test_the_kept_set_is_that_of_one_device(found, name):
    assert all(case["same"] for case in found[name].values())


@pytest.mark.parametrize("name", ALLOCATORS)
def test_what_is_exchanged_does_not_grow_with_the_slots(found, name):
    few, many = (found[name][slots]["bytes"] for slots in ("32", "256"))
    assert few == many


@pytest.mark.parametrize("name", ["uniform", "pyramid"])
def test_heads_that_do_not_compete_exchange_nothing(found, name):
    assert found[name]["256"]["bytes"] == 0


def test_heads_that_compete_exchange_a_count_per_pass_and_row_and_their_shares(found):
    assert found["global"]["256"]["count"] == {"all-reduce": 32, "all-gather": 2}
    passes = 32 * 4 * B // 2
    shares = 4 * L * (B // 2) * K
    assert passes <= found["global"]["256"]["bytes"] <= passes + 4 * shares
