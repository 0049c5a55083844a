"""Rolling back removes positions, and the state that belongs to them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.entries import entry_positions, first_range, kept_mask, slot_state
from kvjax.cache.rollback import rollback
from kvjax.eviction import QUERIES, QUERY_POSITIONS
from tests.models.small import random_model

PROMPTS = [[int(i) for i in np.random.default_rng(s).integers(0, 300, 30)] for s in range(2)]
SNAPKV = kvjax.policy("snapkv", window=6, decode_interval=8)


@pytest.mark.parametrize("pages", [None, 4])
def test_an_extension_is_undone(pages):
    model = random_model()
    _, before = kvjax.prefill(model, PROMPTS, policy=SNAPKV, budget=40, pages=pages)
    more = [[5, 6, 7], [8, 9, 10]]
    _, after = kvjax.extend(model, before, more, policy=SNAPKV, budget=40)
    back = rollback(after, jnp.array([30, 31], jnp.int32))

    np.testing.assert_array_equal(back.next_position, [30, 31])
    np.testing.assert_array_equal(back.lengths[:, 0], before.lengths[:, 0])
    np.testing.assert_array_equal(back.lengths[:, 1], before.lengths[:, 1] + 1)
    np.testing.assert_array_equal(kept_mask(back, 33), kept_mask(before, 33))
    assert entry_positions(back)[:, 1].max() == 30
    if pages is not None:
        assert (back.free_count[:1] == before.free_count[:1]).all()

    # Three newer queries took the place of the three oldest; those cannot come back.
    ring = np.asarray(back.policy_state.layer[QUERY_POSITIONS][:, 0])
    np.testing.assert_array_equal(ring, [[-1, -1, -1, 27, 28, 29]] * 3)
    np.testing.assert_array_equal(
        back.policy_state.layer[QUERIES][:, 0, :, 3:],
        before.policy_state.layer[QUERIES][:, 0, :, 3:],
    )
    ring = np.asarray(back.policy_state.layer[QUERY_POSITIONS][:, 1])
    np.testing.assert_array_equal(ring, [[-1, -1, 27, 28, 29, 30]] * 3)


def test_slot_state_stays_with_its_entry():
    model, policy = random_model(), kvjax.policy("h2o")
    _, cache = kvjax.prefill(model, PROMPTS, policy=policy, budget=20, pages=4)
    back = rollback(cache, jnp.array([25, 30], jnp.int32))
    before, after = (
        (np.asarray(entry_positions(c)), np.asarray(slot_state(c)["attention_mass"]))
        for c in (cache, back)
    )
    for index in np.ndindex(before[0].shape[:3]):
        mass = dict(zip(before[0][index].tolist(), before[1][index].tolist(), strict=True))
        limit = (25, 30)[index[1]]
        kept = {place: found for place, found in mass.items() if 0 <= place < limit}
        found = dict(zip(after[0][index].tolist(), after[1][index].tolist(), strict=True))
        found.pop(-1, None)
        assert found == kept


def test_nothing_before_the_first_token_stays():
    model = random_model()
    _, cache = kvjax.prefill(model, PROMPTS, room=2)
    back = rollback(cache, jnp.zeros(2, jnp.int32))
    assert not np.asarray(back.lengths).any()
    assert not any(np.asarray(leaf).any() for leaf in (back.keys, back.values))
    assert (np.asarray(back.positions) == -1).all()


def test_a_later_position_changes_nothing():
    model = random_model()
    _, cache = kvjax.prefill(model, PROMPTS, room=2)
    back = rollback(cache, jnp.array([30, 99], jnp.int32))
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("mask", "found"), [("1", (0, 0)), ("0110", (1, 2)), ("0011", (2, 3)), ("101", (0, 0))]
)
def test_the_first_range(mask, found):
    assert first_range(np.array([bit == "1" for bit in mask])) == found
