"""The modality of an entry goes wherever the entry goes, and changes nothing else."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import decoding
from kvjax.cache.entries import entry_positions, slot_state
from kvjax.cache.rollback import rollback
from kvjax.policies.observation import MODALITY
from tests import tiny
from tests.models.small import random_model

PROMPT = np.random.default_rng(0).integers(0, 300, (2, 40)).astype(np.int32)
LENGTHS = np.array([40, 25], np.int32)
QUESTION = np.random.default_rng(1).integers(0, 300, (2, 5)).astype(np.int32)
IDS = np.random.default_rng(2).integers(0, 4, (2, 40)).astype(np.int32)
IDS[:, 0] = 127
QUESTION_IDS = np.array([[5, 0, 6, 5, 6], [0, 6, 6, 5, 5]], np.int32)
BUDGET = np.array([10, 8], np.int32)
POLICIES = {
    "full": kvjax.policy("full"),
    "uniform": kvjax.policy("snapkv", window=4),
    "global": kvjax.policy("knorm", allocator="global"),
    "decoding": kvjax.policy("h2o", decode_interval=3),
    "chunked": kvjax.policy("knorm", prefill="chunked", chunk=16),
    "chunked, decoding": kvjax.policy("keydiff", prefill="chunked", chunk=16, decode_interval=3),
}
# The same shapes for all, so that they share compiled programs.
CAPACITY = 56
LAYOUTS = {"padded": None, "paged": kvjax.Pages(size=8, pool=42, per_head=7)}
CASES = [
    *((name, "padded") for name in ("full", "global", "chunked", "chunked, decoding")),
    *((name, "paged") for name in ("uniform", "decoding")),
]


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with tiny.quick_compilation():
        yield


def filled(name: str, pages: kvjax.Pages | None = None, **options):
    policy = POLICIES[name]
    budget = jnp.asarray(LENGTHS if name == "full" else BUDGET)
    given = {"policy": policy, "budget": budget, "capacity": CAPACITY, "pages": pages} | options
    return kvjax.prefill(random_model(), jnp.asarray(PROMPT), jnp.asarray(LENGTHS), **given)


def going_on(name: str) -> dict:
    """The arguments with which extend and generate go on."""
    if POLICIES[name].schedule.decode_interval is None:
        return {}
    return {"policy": POLICIES[name], "budget": jnp.asarray(BUDGET)}


def check(cache, *calls: tuple[np.ndarray, np.ndarray]) -> None:
    """Every entry has the modality of its position; `calls` are (modalities, lengths)."""
    positions = np.asarray(entry_positions(cache))
    found = slot_state(cache)[MODALITY]
    assert found.dtype == jnp.int8
    counts = kvjax.modality_counts(cache)
    for row in range(cache.batch):
        of_position = np.concatenate([ids[row, : lengths[row]] for ids, lengths in calls])
        of_position = np.concatenate([of_position, np.zeros(64, np.int32)])  # generated: text
        held = positions[:, row]
        assert (held >= 0).any()
        wanted = of_position[held]
        np.testing.assert_array_equal(
            np.asarray(found)[:, row][held >= 0], wanted[held >= 0], strict=False
        )
        for layer, head in np.ndindex(held.shape[:2]):
            kept = wanted[layer, head][held[layer, head] >= 0]
            ids, times = np.unique(kept, return_counts=True)
            here = {i: n[layer, row, head] for i, n in counts.items() if n[layer, row, head]}
            assert here == dict(zip(ids.tolist(), times.tolist(), strict=True))


def without_modality(tree):
    """The cache as if it had not been asked for modalities."""
    state = tree.policy_state
    slots = {name: array for name, array in state.slots.items() if name != MODALITY}
    return dataclasses.replace(tree, policy_state=dataclasses.replace(state, slots=slots))


def assert_equal(left, right) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_it_follows_the_entries_and_changes_nothing(name, layout):
    model, more = random_model(), going_on(name)
    sizes = jnp.asarray([5, 3], jnp.int32)
    question = jnp.asarray(QUESTION)
    caches, outputs = [], []
    for asked in (True, False):
        ids = {"modalities": jnp.asarray(IDS)} if asked else {}
        logits, start = filled(name, LAYOUTS[layout], **ids)
        ids = {"modalities": jnp.asarray(QUESTION_IDS)} if asked else {}
        later, extended = kvjax.extend(model, start, question, sizes, **more, **ids)
        out = kvjax.generate(model, extended, later, max_new_tokens=6, **more)
        caches.append((start, extended, out.cache))
        outputs.append((logits, later, out.tokens))
    calls = [(IDS, LENGTHS), (QUESTION_IDS, np.array([5, 3]))]
    for cache, seen in zip(caches[0], (calls[:1], calls, calls), strict=True):
        check(cache, *seen)
    assert_equal(outputs[0], outputs[1])
    assert all(MODALITY not in cache.policy_state.slots for cache in caches[1])
    assert_equal([without_modality(cache) for cache in caches[0]], list(caches[1]))


@pytest.mark.parametrize(
    ("name", "layout"),
    [("uniform", "padded"), ("full", "paged"), ("global", "paged"), ("decoding", "paged")],
)
def test_compress_leaves_what_prefill_leaves(name, layout):
    policy = POLICIES[name]
    prompt = (jnp.asarray(PROMPT), jnp.asarray(LENGTHS))
    _, whole, observed = kvjax.observe(random_model(), *prompt, policies=(policy,))
    budget = jnp.asarray(LENGTHS if name == "full" else BUDGET)
    cache = kvjax.compress(
        random_model(), whole, observed, policy=policy, budget=budget, capacity=CAPACITY,
        pages=LAYOUTS[layout], modalities=jnp.asarray(IDS),
    )  # fmt: skip
    check(cache, (IDS, LENGTHS))
    prefilled = filled(name, LAYOUTS[layout], modalities=jnp.asarray(IDS))[1]
    assert_equal(kvjax.modality_counts(cache), kvjax.modality_counts(prefilled))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_files_rollback_and_rerotation_keep_it(layout, tmp_path):
    model, policy = random_model(), POLICIES["uniform"]
    cache = filled("uniform", LAYOUTS[layout], modalities=jnp.asarray(IDS))[1]
    swapped = kvjax.take_rows(kvjax.stack_rows([cache, cache]), [3, 0])
    check(swapped, (IDS[::-1], LENGTHS[::-1]))
    path = kvjax.save_cache(cache, tmp_path / "c", model=model, policy=policy)
    assert_equal(kvjax.load_cache(path, model=model, policy=policy), cache)
    check(rollback(cache, jnp.asarray([38, 23], jnp.int32)), (IDS, LENGTHS))
    packed = kvjax.rerotate(model, cache)
    assert_equal(kvjax.modality_counts(packed), kvjax.modality_counts(cache))


def test_tokens_of_no_given_modality_are_text():
    cache = filled("full", modalities=jnp.asarray(IDS))[1]
    lengths = jnp.asarray([5, 5], jnp.int32)
    _, extended = kvjax.extend(random_model(), cache, jnp.asarray(QUESTION), lengths)
    check(extended, (IDS, LENGTHS), (np.zeros_like(QUESTION), np.array([5, 5])))


def test_lists_are_taken_as_tokens_are():
    rows = [PROMPT[0, :20].tolist(), PROMPT[1, :9].tolist()]
    ids = [IDS[0, :20].tolist(), IDS[1, :9].tolist()]
    model = random_model()
    _, cache = kvjax.prefill(model, rows, modalities=ids, room=2)
    check(cache, (IDS, np.array([20, 9])))
    _, observed_cache, observed = kvjax.observe(model, rows)
    options = {"policy": "full", "budget": 1.0, "modalities": ids}
    check(kvjax.compress(model, observed_cache, observed, **options), (IDS, np.array([20, 9])))
    _, one = kvjax.prefill(model, rows[0], modalities=ids[0])
    check(one, (IDS[:1], np.array([20])))


def test_it_goes_through_jit_and_a_donated_cache():
    policy = POLICIES["decoding"]
    run = jax.jit(partial(kvjax.prefill, policy=policy, capacity=20))
    model, lengths = random_model(), jnp.asarray(LENGTHS)
    given = {"budget": jnp.asarray(BUDGET), "modalities": jnp.asarray(IDS)}
    _, cache = run(model, jnp.asarray(PROMPT), lengths, **given)
    check(cache, (IDS, LENGTHS))
    step = jax.jit(partial(decoding.extend, policy=policy), donate_argnums=1)
    sizes = jnp.asarray([1, 1], jnp.int32)
    more = {"budget": jnp.asarray(BUDGET), "modalities": jnp.asarray(QUESTION_IDS[:, :1])}
    _, cache = step(model, cache, jnp.asarray(QUESTION[:, :1]), sizes, **more)
    check(cache, (IDS, LENGTHS), (QUESTION_IDS, np.array([1, 1])))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.full((1, 4), 128), "modality 128: allowed are 0 .text. to 127"),
        ([[0, -1, 0, 0]], "modality -1: allowed are 0 .text. to 127"),
        (np.zeros((1, 3), np.int32), r"modalities of shape \(1, 3\): allowed is \(1, 4\)"),
        ([[0, 0, 0]], r"modalities of \[3\] ids: allowed are \[4\]"),
        ([[0] * 4, [0] * 4], r"modalities of \[4, 4\] ids: allowed are \[4\]"),
        ([[0.5, 0, 0, 0]], "modalities of dtype float64: allowed are integers"),
    ],
)
def test_what_is_no_modality_is_refused_at_every_door(ids, message):
    model = random_model()
    rows = [PROMPT[0, :4].tolist()]
    _, cache = kvjax.prefill(model, rows, room=4)
    _, whole, observed = kvjax.observe(model, rows)
    doors = (
        partial(kvjax.prefill, model, rows),
        partial(kvjax.extend, model, cache, rows),
        partial(kvjax.compress, model, whole, observed, policy="full", budget=1.0),
    )
    for door in doors:
        with tiny.as_installed(), pytest.raises(ValueError, match=message) as refused:
            door(modalities=ids)
        assert "\n" not in str(refused.value)


def test_a_cache_that_carries_none_says_so():
    cache = filled("uniform")[1]
    with pytest.raises(ValueError, match="modality_counts: this cache carries none") as refused:
        kvjax.modality_counts(cache)
    assert "\n" not in str(refused.value)
    for name in ("uniform", "decoding"):
        cache = filled(name)[1]
        sizes, ids = jnp.asarray([5, 3], jnp.int32), jnp.asarray(QUESTION_IDS)
        with pytest.raises(ValueError, match="carries none: prefill with modalities") as refused:
            kvjax.extend(
                random_model(), cache, jnp.asarray(QUESTION), sizes, **going_on(name),
                modalities=ids,
            )  # fmt: skip
        assert "\n" not in str(refused.value)


def test_the_state_of_a_policy_is_still_asked_for():
    cache = filled("decoding", modalities=jnp.asarray(IDS))[1]
    sizes = jnp.asarray([5, 3], jnp.int32)
    with pytest.raises(ValueError, match="carries the state of a policy"):
        kvjax.extend(random_model(), cache, jnp.asarray(QUESTION), sizes)
