"""Any policy, allocator, schedule, dtype and batch: what holds for every one of them."""

from __future__ import annotations

import dataclasses
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.eviction import capacity_for
from kvjax.policies import allocators
from kvjax.policies.base import Allocator, Remainder
from tests import tiny

STEPS = 6
WINDOW = 12  # of the tiny model's local layer


def stands_out(name: str) -> bool:
    """Whether the policy has state, an allocator or a remainder of its own: what can interact."""
    policy = tiny.policy(name)
    if policy.scorer is None:
        return False
    scorer = policy.scorer.for_model(0, tiny.CONFIG.head_dim)
    fields = scorer.slot_fields() or scorer.layer_fields()
    common = policy.allocator == allocators.Uniform() and policy.remainder == Remainder()
    return bool(fields) or not common


NAMES = ["snapkv", *filter(stands_out, tiny.names())]
KINDS: dict[str, Allocator | None] = {
    "own": None,
    "uniform": allocators.Uniform(),
    "pyramid": allocators.Pyramid(recent=4),
    "ada": allocators.Ada(),
    "cake": allocators.Cake(),
    "global": allocators.Global(),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "whole": {"prefill": "whole", "decode_interval": 0},
    "chunked": {"prefill": "chunked", "chunk": 16, "decode_interval": 0},
    "decode 1": {"prefill": "whole", "decode_interval": 1},
    "decode 5": {"prefill": "whole", "decode_interval": 5},
    "both": {"prefill": "chunked", "chunk": 16, "decode_interval": 5},
}
BATCHES = {
    "one": (np.array([48], np.int32), np.array([12], np.int32)),
    "ragged": (tiny.LENGTHS, tiny.QUARTER),
}

profile = settings(
    max_examples=1,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.quick_compilation():
        yield


def composed(name: str, allocator: str, schedule: str) -> kvjax.Policy:
    policy = tiny.policy(name, **SCHEDULES[schedule])
    chosen = KINDS[allocator]
    return policy if chosen is None else dataclasses.replace(policy, allocator=chosen)


def needed(policy: kvjax.Policy, budget: np.ndarray) -> int:
    """Slots per head by default."""
    windows = [int(window) for window in tiny.model().windows]
    return capacity_for(policy, int(budget.max()), tiny.PROMPT, windows, 2, room=STEPS)


def capacity(policy: kvjax.Policy, budget: np.ndarray) -> int:
    """The default where the cache evicts while decoding, else one that shares compilations.

    With more slots than needed nothing hides an allocator that asks for too many.
    """
    return tiny.CAPACITY if policy.schedule.decode_interval is None else needed(policy, budget)


def bound(policy: kvjax.Policy, budget: np.ndarray) -> np.ndarray:
    """Entries each row may hold over all layers and heads behind a prefill."""
    return 2 * (3 * budget + WINDOW)


def prefilled(policy: kvjax.Policy, dtype: str, batch: str, seed: int = 0):
    lengths, budget = BATCHES[batch]
    ids = tiny.tokens(seed)[: len(lengths)]
    return tiny.prefill(
        ids, lengths, budget, policy, dtype=dtype, capacity=capacity(policy, budget)
    )


def generated(policy: kvjax.Policy, dtype: str, batch: str, logits, cache):
    evicts = {}
    if policy.schedule.decode_interval is not None or policy.remembers:
        evicts = {
            "policy": policy,
            "budget": jnp.asarray(BATCHES[batch][1]),
            "params": tiny.params(policy.name, dtype),
        }
    return kvjax.generate(tiny.model(dtype), cache, logits, max_new_tokens=STEPS, **evicts)


def check_rows(first, second, row: int) -> None:
    """Row `row` of two caches is the same to the bit."""
    mine, other = (kvjax.take_rows(cache, [row]) for cache in (first, second))
    jax.tree.map(np.testing.assert_array_equal, mine, other)


CHOICES = {
    "allocator": sorted(KINDS),
    "schedule": sorted(SCHEDULES),
    "dtype": ["bfloat16", "float32"],
    "batch": sorted(BATCHES),
}


def mixed(choice: str, name: str) -> list[str]:
    """The values of a choice, turned by another number of places for every policy.

    Hypothesis starts with the first, so that one example per policy reaches every value.
    """
    places = np.random.default_rng(crc32(choice.encode())).permutation(len(NAMES))
    turned = np.roll(np.array(CHOICES[choice]), places[NAMES.index(name)])
    return [str(value) for value in turned]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@profile
def test_every_composition_is_bounded_ordered_and_its_own(name, data):
    check_composition(name, *(data.draw(st.sampled_from(mixed(c, name))) for c in CHOICES))


@pytest.mark.parametrize("choice", list(CHOICES))
def test_every_value_of_a_choice_is_reached(choice):
    assert {mixed(choice, name)[0] for name in NAMES} == set(CHOICES[choice])


@pytest.mark.parametrize(
    ("name", "allocator", "schedule"),
    [("snapkv", "global", "both"), ("compactor", "pyramid", "decode 5")],
)
def test_stateful_scorers_under_uneven_allocators(name, allocator, schedule):
    check_composition(name, allocator, schedule, "float32", "ragged")


def check_composition(name, allocator, schedule, dtype, batch):
    policy = composed(name, allocator, schedule)
    lengths, budget = BATCHES[batch]
    logits, cache = prefilled(policy, dtype, batch)
    tiny.check_invariants(cache, lengths)
    assert np.asarray(cache.lengths).max() <= needed(policy, budget)
    assert np.isfinite(logits).all()
    assert (np.asarray(cache.lengths).sum(axis=(0, 2)) <= bound(policy, budget)).all()
    if policy.remainder == Remainder() and policy.schedule.prefill == "whole":
        whole = kvjax.take_rows(tiny.full(0, dtype)[1], range(len(lengths)))
        # A batch of another size is multiplied in another order.
        tiny.check_entries(cache, whole, 1e-5 if dtype == "float32" else 0.05)

    out = generated(policy, dtype, batch, logits, cache)
    tiny.check_invariants(out.cache, lengths + STEPS)
    np.testing.assert_array_equal(out.cache.overflowed, 0)
    assert np.isfinite(out.logits).all()
    assert out.cache.capacity == cache.capacity

    if batch == "ragged":  # the same programs, with other prompts in the other rows
        ids = tiny.tokens(1).copy()
        ids[1] = tiny.tokens()[1]
        other_logits, other = tiny.prefill(
            ids,
            np.array([9, lengths[1], 48], np.int32),
            np.array([3, budget[1], 12], np.int32),
            policy,
            dtype=dtype,
            capacity=cache.capacity,
        )
        check_rows(cache, other, 1)
        np.testing.assert_array_equal(logits[1], other_logits[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Equal(kvjax.Scorer):
    """The same score for every entry."""

    def score(self, observation, params, state):
        return jnp.zeros(observation.positions.shape, jnp.float32)


@pytest.mark.parametrize(
    ("allocator", "schedule"),
    [("uniform", "both"), ("pyramid", "whole"), ("ada", "decode 1"), ("global", "chunked")],
)
def test_protected_entries_survive_equal_scores_under_every_allocator(allocator, schedule):
    options = dict(SCHEDULES[schedule])
    options["decode_interval"] = options["decode_interval"] or None
    policy = kvjax.Policy(
        name="equal",
        scorer=Equal(),
        allocator=KINDS[allocator],
        protection=kvjax.Protection(sinks=2, recent=2),
        schedule=kvjax.Schedule(**options),
    )
    budget = np.array([12, 8, 5], np.int32)
    logits, cache = tiny.prefill(
        tiny.tokens(), tiny.LENGTHS, budget, policy, capacity=capacity(policy, budget)
    )
    seen = [(cache, tiny.LENGTHS)]
    if policy.schedule.decode_interval:
        out = kvjax.generate(
            tiny.model(),
            cache,
            logits,
            max_new_tokens=STEPS,
            policy=policy,
            budget=jnp.asarray(budget),
        )
        seen.append((out.cache, tiny.LENGTHS + STEPS))
    for cache, lengths in seen:
        for row, layer, head in np.ndindex(3, 3, 2):
            kept = tiny.kept(cache, layer, row, head)
            # Of a local layer only the window is of use. A head whose share is smaller than what
            # is protected keeps its sinks first, then the newest.
            ranked = [*([0, 1] if layer != 1 else []), lengths[row] - 1, lengths[row] - 2]
            assert np.isin(ranked[: len(kept)], kept).all()
