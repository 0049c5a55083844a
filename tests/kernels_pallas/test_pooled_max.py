"""The pooled maximum: values, arguments and gradients against NumPy in float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.pooled_max import blockwise, pooled_max
from kernels_pallas.pooled_max.pairs import Rule, Tensors, all_scores
from kernels_pallas.retention_attention.segments import tokens, visible

FORMS = ["reference", "blockwise"]
STATIC = ("scale", "activation", "reduce", "near", "implementation")
chosen = jax.jit(pooled_max, static_argnames=STATIC)
INDEXER = {"activation": "relu", "reduce": "sum", "scale": 1.0}
TEACHER = {"activation": "identity", "reduce": "max", "scale": 0.35}

# Packed documents, one of them a single token, padding at the end; and a row of one document.
PACKED = [[0] * 14 + [1] * 19 + [2] + [3] * 8 + [-1] * 3, [5] * 45]


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Several blocks within a few tokens."""
    patch = pytest.MonkeyPatch()
    small = partial(blockwise.pooled_max, query_block=8, key_block=16)
    patch.setattr(blockwise, "pooled_max", small)
    yield
    patch.undo()


def definition(case, rule, near=0):
    """The largest score of every key and the first query that gives it, pair by pair."""
    queries, keys, weights, offsets = (
        None if case[name] is None else np.asarray(case[name], np.float64)
        for name in ("queries", "keys", "weights", "offsets")
    )
    batch, heads, length, _ = queries.shape
    slots, group = keys.shape[2], heads // keys.shape[1]
    pooled = np.full((batch, slots), -np.inf)
    query = np.full((batch, slots), -1)
    for b, t in np.ndindex(batch, slots):
        for s in range(length):
            if not sees(case, b, s, t, near):
                continue
            parts = []
            for h in range(heads):
                z = rule["scale"] * (queries[b, h, s] @ keys[b, h // group, t])
                z -= 0 if offsets is None else offsets[b, h, s]
                z = max(z, 0) if rule["activation"] == "relu" else z
                parts.append(z * (1 if weights is None else weights[b, h, s]))
            score = max(parts) if rule["reduce"] == "max" else sum(parts)
            if score > pooled[b, t]:
                pooled[b, t], query[b, t] = score, s
    return pooled, query


def sees(case, b, s, t, near):
    asking, held = case["query_positions"][b, s], case["key_positions"][b, t]
    if case["query_segments"] is not None:
        segments = case["query_segments"][b, s], case["key_segments"][b, t]
        if segments[0] != segments[1] or segments[0] < 0:
            return False
    return held >= 0 and asking >= 0 and held <= asking - near


def a_case(
    batch, heads, kv_heads, length, size=4, seed=0, *, slots=None, segments=None, bare=False
):
    """Random arrays; by default a prompt that looks at itself."""
    draw = np.random.default_rng(seed)
    slots = slots or length

    def normal(*shape):
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    def integers(array):
        return jnp.asarray(np.broadcast_to(array, (batch, np.shape(array)[-1])), jnp.int32)

    segments = None if segments is None else integers(segments)
    return {
        "queries": normal(batch, heads, length, size),
        "keys": normal(batch, kv_heads, slots, size),
        "query_positions": integers(np.arange(slots - length, slots)),
        "key_positions": integers(np.arange(slots)),
        "weights": None if bare else normal(batch, heads, length),
        "offsets": None if bare else normal(batch, heads, length),
        "query_segments": segments,
        "key_segments": segments,
    }


def run(case, **options):
    return chosen(**case, **options)


def check(case, rule, near=0):
    wanted, query = definition(case, rule, near)
    for form in FORMS:
        pooled, found = run(case, **rule, near=near, implementation=form)
        assert pooled.dtype == jnp.float32 and found.dtype == jnp.int32
        np.testing.assert_allclose(pooled, wanted, rtol=1e-5, atol=1e-5, err_msg=form)
        np.testing.assert_array_equal(found, query, err_msg=form)


@pytest.mark.parametrize("rule", [INDEXER, TEACHER], ids=["indexer", "teacher"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (4, 2), (2, 2)])
def test_values_are_those_of_all_pairs(rule, heads, kv_heads):
    check(a_case(2, heads, kv_heads, 21, seed=heads), rule)
    check(a_case(1, heads, kv_heads, 9, bare=True), rule)


@pytest.mark.parametrize("activation", ["relu", "identity"])
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_every_activation_goes_with_every_reduction(activation, reduce):
    rule = {"activation": activation, "reduce": reduce, "scale": 0.5}
    check(a_case(2, 4, 2, 19, seed=1), rule)


@pytest.mark.parametrize("length", [1, 7, 8, 16, 17, 33])
@pytest.mark.parametrize("near", [0, 1, 8, 40])
def test_rows_of_any_length_and_pairs_of_any_distance(length, near):
    check(a_case(2, 2, 1, length, seed=length), INDEXER, near)


@pytest.mark.parametrize("near", [0, 3])
def test_packed_documents_do_not_see_each_other(near):
    check(a_case(2, 2, 1, 45, seed=3, segments=PACKED), INDEXER, near)


@given(seed=st.integers(0, 10**6), near=st.sampled_from([0, 2, 9]), data=st.data())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_positions_and_segments_may_lie_in_any_order(seed, near, data):
    """Fewer queries than slots, empty slots and padding anywhere, documents interrupted."""
    draw = np.random.default_rng(seed)
    case = a_case(2, 2, 1, 19, seed=seed, slots=37)
    for name, count in (("query", 19), ("key", 37)):
        places = draw.integers(-1, 40, (2, count))
        runs = data.draw(st.lists(st.integers(-1, 2), min_size=2, max_size=5))
        segments = np.resize(np.repeat(runs, count // len(runs) + 1), (2, count))
        case[f"{name}_positions"] = jnp.asarray(places, jnp.int32)
        case[f"{name}_segments"] = jnp.asarray(segments, jnp.int32)
    check(case, INDEXER, near)


def test_of_equal_scores_the_first_query_is_named():
    case = a_case(1, 2, 1, 37, bare=True)
    same = {name: jnp.ones_like(case[name]) for name in ("queries", "keys")}
    for form in FORMS:
        pooled, query = run(case | same, **INDEXER, near=2, implementation=form)
        np.testing.assert_array_equal(query[0], [*range(2, 37), -1, -1])
        np.testing.assert_array_equal(pooled[0], [8.0] * 35 + [-np.inf] * 2)


def test_keys_that_no_query_sees_get_nothing():
    case = a_case(2, 2, 1, 5, slots=20, seed=4)
    case["query_positions"] = jnp.asarray([[-1] * 5, [3, -1, 2, 1, 0]], jnp.int32)
    for form in FORMS:
        pooled, query = run(case, **INDEXER, implementation=form)
        np.testing.assert_array_equal(np.isneginf(pooled), query == -1)
        np.testing.assert_array_equal(query >= 0, [[False] * 20, [True] * 4 + [False] * 16])


def test_what_padding_holds_reaches_neither_values_nor_gradients():
    case = a_case(1, 2, 1, 30, seed=5, segments=[0] * 24 + [-1] * 6)
    garbage = {n: case[n].at[:, :, 24:].set(jnp.nan) for n in ("queries", "keys")}
    garbage |= {n: case[n].at[:, :, 24:].set(jnp.inf) for n in ("weights", "offsets")}
    for form in FORMS:
        clean, poisoned = (gradients(c, INDEXER, form) for c in (case, case | garbage))
        jax.tree.map(np.testing.assert_array_equal, clean, poisoned)


ARRAYS = ("queries", "keys", "weights", "offsets")


def probe(pooled):
    """A fixed weighted sum over the keys that somebody sees."""
    weight = jnp.cos(0.7 * jnp.arange(pooled.size, dtype=jnp.float32)).reshape(pooled.shape)
    return jnp.sum(jnp.where(pooled > -jnp.inf, pooled * weight, 0.0))


def gradients(case, rule, form, near=0):
    def value(arrays):
        return probe(run(case | arrays, **rule, near=near, implementation=form)[0])

    return jax.grad(value)({name: case[name] for name in ARRAYS if case[name] is not None})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", [INDEXER, TEACHER], ids=["indexer", "teacher"])
@pytest.mark.parametrize("near", [0, 2])
def test_gradients_are_those_of_the_dense_definition(form, rule, near):
    case = a_case(2, 4, 2, 45, seed=6, segments=PACKED)
    everyone = tokens(case["query_segments"])
    far = everyone._replace(
        positions=jnp.where(everyone.positions >= near, everyone.positions - near, -1)
    )
    seen = visible(far, everyone)

    def value(arrays):
        full = Tensors(*(arrays[name] for name in ARRAYS))
        scores = all_scores(Rule(rule["scale"], rule["activation"], rule["reduce"]), full)
        return probe(jnp.max(jnp.where(seen, scores, -jnp.inf), axis=1))

    wanted = jax.grad(value)({name: case[name] for name in ARRAYS})
    found = gradients(case, rule, form, near)
    for name in ARRAYS:
        assert float(jnp.abs(wanted[name]).max()) > 0
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("rule", [INDEXER, TEACHER], ids=["indexer", "teacher"])
def test_gradients_equal_finite_differences_of_the_definition(rule):
    case = a_case(1, 2, 1, 9, size=3, seed=7)
    exact = {name: np.asarray(case[name], np.float64) for name in ARRAYS}
    found = gradients(case, rule, "blockwise", near=1)
    weight = np.cos(0.7 * np.arange(9))
    for name in ARRAYS:
        wanted = np.zeros(exact[name].shape)
        for place in np.ndindex(wanted.shape):
            ends = []
            for step in (1e-5, -1e-5):
                exact[name][place] += step
                pooled, _ = definition(case | exact, rule, near=1)
                ends.append(np.where(np.isfinite(pooled[0]), pooled[0] * weight, 0).sum())
                exact[name][place] -= step
            wanted[place] = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(found[name], wanted, atol=1e-4, err_msg=name)


def test_bfloat16_products_are_summed_in_float32():
    case = a_case(1, 4, 2, 40, size=64, seed=8)
    half = {name: case[name].astype(jnp.bfloat16) for name in ("queries", "keys")}
    exact = {name: array.astype(jnp.float32) for name, array in half.items()}
    wanted, query = definition(case | exact, TEACHER)
    for form in FORMS:
        pooled, found = run(case | half, **TEACHER, implementation=form)
        np.testing.assert_allclose(pooled, wanted, rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(found, query)
        assert gradients(case | half, TEACHER, form)["keys"].dtype == jnp.bfloat16


def test_vmap_equals_a_loop():
    cases = [a_case(1, 2, 1, 33, seed=seed, bare=True) for seed in (9, 10)]
    stacked = {
        name: None if cases[0][name] is None else jnp.stack([case[name] for case in cases])
        for name in cases[0]
    }
    found = jax.vmap(lambda case: run(case, **INDEXER, implementation="blockwise"))(stacked)
    for index, case in enumerate(cases):
        wanted = run(case, **INDEXER, implementation="blockwise")
        jax.tree.map(lambda a, b, i=index: np.testing.assert_array_equal(a[i], b), found, wanted)


def working_memory(form, length):
    """Bytes that a compiled forward and backward pass needs beside its arguments and results."""
    case = a_case(1, 2, 1, length, size=8)

    def both(arrays):
        return gradients(case | arrays, INDEXER, form)

    arrays = {name: case[name] for name in ARRAYS}
    return jax.jit(both).lower(arrays).compile().memory_analysis().temp_size_in_bytes


def test_memory_in_blocks_is_linear_in_length():
    short, long = (working_memory("blockwise", length) for length in (1024, 2048))
    assert long < 2.1 * short
    assert long < 2048 * 2048 * 4 / 8  # far from one array of all pairs
    assert working_memory("reference", 1024) > 1024 * 1024


def shapes(jaxpr):
    """Shapes of everything that a jaxpr and what is inside it computes."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from shapes(inner)


def test_no_array_of_all_pairs_is_ever_named():
    length = 1024
    case = a_case(1, 2, 1, length)

    def value(arrays):
        return probe(run(case | arrays, **INDEXER)[0])

    arrays = {name: case[name] for name in ARRAYS}
    found = list(shapes(jax.make_jaxpr(jax.grad(value))(arrays).jaxpr))
    assert len(found) > 100
    assert all(shape.count(length) < 2 for shape in found)


@pytest.mark.parametrize("length", [362, 363])
def test_the_automatic_choice_agrees_on_both_sides_of_its_threshold(length):
    case = a_case(1, 2, 1, length, seed=11)
    wanted = run(case, **INDEXER, implementation="reference")
    for found, exact in zip(run(case, **INDEXER), wanted, strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-5)


def test_calls_that_cannot_be_served_are_refused_with_what_to_do():
    case = a_case(1, 4, 2, 6)
    with pytest.raises(ValueError, match="near=-1: allowed are integers >= 0"):
        pooled_max(**case, near=-1)
    for name in ("activation", "reduce", "implementation"):
        with pytest.raises(Exception, match="gelu"):
            pooled_max(**case, **{name: "gelu"})
    with pytest.raises(ValueError, match="3 query heads cannot share 2 KV heads"):
        pooled_max(**case | {n: case[n][:, :3] for n in ("queries", "weights", "offsets")})
    with pytest.raises(ValueError, match="cast them to one dtype"):
        pooled_max(**case | {"keys": case["keys"].astype(jnp.bfloat16)})
    with pytest.raises(ValueError, match="compute them in float32"):
        pooled_max(**case | {"weights": case["weights"].astype(jnp.bfloat16)})
    with pytest.raises(ValueError, match="give both"):
        pooled_max(**case | {"key_segments": case["key_positions"]})
