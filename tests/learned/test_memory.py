"""Latent memory of one layer against its definition, and what has to hold for every option."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.learned import memory
from kvjax.learned.memory import MemoryConfig
from tests import tiny
from tests.learned import memory_by_hand as by_hand

ROWS, HEADS, KV_HEADS, SLOTS, DIM = 2, 4, 2, 9, 6
SIZES = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
CONFIGS = [
    MemoryConfig(),
    MemoryConfig(normalise=False, decay=0.5, eta=0.3, eps=1e-3),
    MemoryConfig(phi="dense", gate="linear", combine="convex"),
    MemoryConfig(phi="per_head", size=8, gate="per_head", combine="lse"),
    MemoryConfig(size=5, gate="per_head", combine="lse"),
    MemoryConfig(phi="per_head", size=4, normalise=False),
]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.phi}-{c.combine}")
write = jax.jit(memory.write, static_argnames=("config", "aligned", "decays"))
read = jax.jit(memory.read, static_argnames="config")


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.quick_compilation():
        yield


def parameters(config):
    arrays = memory.init_memory(config, jax.random.key(1), num_layers=1, **SIZES)
    rng = np.random.default_rng(2)
    drawn = {n: rng.normal(size=a.shape[1:]) / a.shape[-2] ** 0.5 for n, a in arrays.items()}
    return {name: jnp.asarray(array, jnp.float32) for name, array in drawn.items()}


def empty(config):
    shapes = config.state_shapes(HEADS, KV_HEADS, DIM)
    return {name: jnp.zeros((ROWS, *shape)) for name, shape in shapes.items()}


def entries(seed, *, aligned=False):
    """Keys, values, positions and what is evicted; slots of a head are tokens of its own.

    Row 1 has empty slots, which hold NaN.
    """
    rng = np.random.default_rng(seed)
    keys, values = rng.normal(size=(2, ROWS, KV_HEADS, SLOTS, DIM))
    own = [np.sort(rng.choice(14, SLOTS, replace=False)) for _ in range(ROWS * KV_HEADS)]
    positions = np.stack(own).reshape(ROWS, KV_HEADS, SLOTS)
    if aligned:
        positions = np.broadcast_to(positions[:, :1], positions.shape).copy()
    positions[1, :, 6:] = -1
    evicted = (rng.random(positions.shape) < 0.6) & (positions >= 0)
    gone = positions[..., None] < 0
    arrays = [np.where(gone, np.nan, a) for a in (keys, values)]
    return (
        *(jnp.asarray(a, jnp.float32) for a in arrays),
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(evicted),
    )


def wanted(config, params, state, given, row, **options):
    m, b = (np.asarray(state[name][row]) for name in ("values", "squares"))
    numbers = {name: np.asarray(a, np.float64) for name, a in params.items()}
    arrays = [np.asarray(a[row]) for a in given]
    return by_hand.write(config, numbers, (m, b), *arrays, HEADS, **options)


def check(state, config, params, before, given, **options):
    for row in range(ROWS):
        m, b = wanted(config, params, before, given, row, **options)
        np.testing.assert_allclose(state["values"][row], m, atol=2e-5)
        np.testing.assert_allclose(state["squares"][row], b, atol=2e-5)


@every_config
def test_what_is_written_is_the_sum_over_tokens(config):
    params, before = parameters(config), empty(config)
    for seed, decays in ((1, True), (2, True), (3, False)):
        given = entries(seed)
        state = write(config, params, before, *given, decays=decays)
        check(state, config, params, before, given, decays=decays)
        before = state


@every_config
def test_slots_that_are_tokens_need_no_alignment(config):
    params, given = parameters(config), entries(1, aligned=True)
    state = write(config, params, empty(config), *given, aligned=True)
    check(state, config, params, empty(config), given)
    sought = write(config, params, empty(config), *given)
    for name, array in state.items():
        np.testing.assert_allclose(array, sought[name], atol=1e-5)


@every_config
def test_what_is_read_is_the_definition(config):
    params, state = parameters(config), empty(config)
    state = write(config, params, state, *entries(1))
    rng = np.random.default_rng(5)
    queries = rng.normal(size=(ROWS, HEADS, 3, DIM)).astype(np.float32)
    attention = rng.normal(size=queries.shape).astype(np.float32)
    lse = rng.normal(size=queries.shape[:3]).astype(np.float32)
    m, mass = read(config, params, state, jnp.asarray(queries))
    logits = memory.gate(params, jnp.asarray(queries))
    out = memory.combine(config, jnp.asarray(attention), jnp.asarray(lse), m, mass, logits)
    numbers = {name: np.asarray(a, np.float64) for name, a in params.items()}
    for row, token in np.ndindex(ROWS, 3):
        one = tuple(np.asarray(state[name][row]) for name in ("values", "squares"))
        query = queries[row, :, token].astype(np.float64)
        expected, weight = by_hand.read(config, numbers, one, query)
        np.testing.assert_allclose(m[row, :, token], expected, atol=1e-4)
        np.testing.assert_allclose(mass[row, :, token], weight, rtol=1e-4)
        gates = by_hand.gate(numbers, query)
        np.testing.assert_allclose(logits[row, :, token], gates, atol=1e-5)
        kept = (attention[row, :, token], lse[row, :, token])
        np.testing.assert_allclose(
            out[row, :, token],
            by_hand.combine(config, *kept, expected, weight, gates),
            atol=1e-4,
        )


@every_config
def test_an_empty_memory_and_a_closed_gate_change_no_bit(config):
    params, queries = (
        parameters(config),
        jax.random.normal(jax.random.key(3), (ROWS, HEADS, 3, DIM)),
    )
    closed = params | {"gate_b2": jnp.full_like(params["gate_b2"], -jnp.inf)}
    full = write(config, params, empty(config), *entries(1))
    lse = jnp.full(queries.shape[:3], 0.3).at[:, :, 2].set(-jnp.inf)  # a row of padding
    for dtype in (jnp.float32, jnp.bfloat16):
        attention = queries.astype(dtype) * jnp.asarray(0.7, dtype)
        for arrays, state in ((params, empty(config)), (closed, full)):
            m, mass = read(config, arrays, state, queries)
            if state is not full:
                assert not np.asarray(m).any() and not np.asarray(mass).any()
            out = memory.combine(config, attention, lse, m, mass, memory.gate(arrays, queries))
            assert out.dtype == dtype
            np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (out, attention)))


@every_config
def test_two_disjoint_writes_without_decay_are_one(config):
    config = dataclasses.replace(config, decay=1.0)
    params, (keys, values, positions, evicted) = parameters(config), entries(1, aligned=True)
    early = evicted & (positions < 7)
    once = write(config, params, empty(config), keys, values, positions, evicted)
    first = write(config, params, empty(config), keys, values, positions, early)
    twice = write(config, params, first, keys, values, positions, evicted & ~early)
    for name, array in once.items():
        np.testing.assert_allclose(array, twice[name], atol=1e-5)


@pytest.mark.parametrize("phi", ["compact", "dense"])
def test_values_per_kv_head_are_read_as_if_expanded_over_the_group(phi):
    config = MemoryConfig(phi=phi)
    params, given = parameters(config), entries(4)
    state = write(config, params, empty(config), *given)
    queries = jax.random.normal(jax.random.key(3), (ROWS, HEADS, 3, DIM))
    m, mass = read(config, params, state, queries)
    expanded = jnp.repeat(
        state["values"].reshape(ROWS, -1, KV_HEADS, DIM), HEADS // KV_HEADS, axis=2
    )
    group = HEADS // KV_HEADS
    asked = queries if phi == "dense" else queries.reshape(ROWS, KV_HEADS, group, 3, DIM).mean(2)
    x = jnp.swapaxes(asked, 1, 2).reshape(ROWS, 3, -1)
    f = by_hand.normalised(config, np.asarray(x) @ np.asarray(params["phi"]))
    found = np.einsum("btm,bmhd->bhtd", f, expanded)
    found = found / (mass * f.shape[-1] + config.eps)[..., None]
    np.testing.assert_allclose(m, found, atol=1e-4)


def test_without_eps_the_rate_of_writing_does_not_matter():
    slow, fast = MemoryConfig(eps=0.0, eta=0.01), MemoryConfig(eps=0.0, eta=7.0)
    params, given = parameters(slow), entries(1)
    queries = jax.random.normal(jax.random.key(3), (ROWS, HEADS, 3, DIM))
    found = [
        read(config, params, write(config, params, empty(config), *given), queries)[0]
        for config in (slow, fast)
    ]
    np.testing.assert_allclose(*found, atol=1e-4)
    assert not np.asarray(read(slow, params, empty(slow), queries)[0]).any()


def test_a_cut_that_takes_nothing_from_a_row_does_not_decay_it():
    config = MemoryConfig()
    params, (keys, values, positions, evicted) = parameters(config), entries(1)
    state = write(config, params, empty(config), keys, values, positions, evicted)
    none = evicted.at[0].set(False)
    again = write(config, params, state, keys, values, positions, none)
    np.testing.assert_array_equal(again["values"][0], state["values"][0])
    np.testing.assert_allclose(again["squares"][1], 1.9 * state["squares"][1], rtol=1e-5)


def test_a_heads_part_of_a_token_stands_with_zeros_for_the_others():
    """What per-head eviction adds to the paper, and why parts of one token have to meet."""
    config = MemoryConfig(normalise=False)
    params, (keys, values, positions, _) = parameters(config), entries(1, aligned=True)
    one = jnp.zeros(positions.shape, bool).at[0, 0, 2].set(True)
    other = jnp.zeros(positions.shape, bool).at[0, 1, 2].set(True)
    add = partial(write, config, params, empty(config), keys, values, positions)
    first, second, both = (np.asarray(add(m)["values"])[0] for m in (one, other, one | other))
    assert not first[:, DIM:].any() and not second[:, :DIM].any()
    # Each head's value meets the other head's key only where both go in one cut.
    assert np.abs(both - first - second).max() > 0.1


def test_fresh_gates_are_a_little_open_for_every_query():
    config = MemoryConfig()
    arrays = memory.init_memory(config, jax.random.key(0), num_layers=2, **SIZES)
    layer = {name: array[1] for name, array in arrays.items()}
    gates = memory.gate(layer, jax.random.normal(jax.random.key(3), (ROWS, HEADS, 3, DIM)))
    np.testing.assert_array_equal(gates, -2.0)


def test_the_size_and_parameters_are_the_papers():
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    shapes = MemoryConfig().shapes(**sizes)
    assert shapes["phi"] == (1024, 512) and 1024 * 512 == 524_288
    assert MemoryConfig(phi="dense").shapes(**sizes)["phi"] == (4096, 512)
    assert MemoryConfig().state_shapes(**sizes)["values"] == (512, 1024)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"phi": "wide"}, "phi='wide': allowed are 'compact', 'dense', 'per_head'"),
        ({"combine": "sum"}, "combine='sum'"),
        ({"gate": "open"}, "gate='open'"),
        ({"coordinates": "rope"}, "coordinates='rope'"),
        ({"size": 0}, "size=0: allowed are integers >= 1"),
        ({"decay": 0.0}, r"decay=0\.0: allowed are numbers in \(0, 1\]"),
        ({"eta": 0.0}, "eta > 0"),
        ({"eps": -1.0}, "eps >= 0"),
    ],
)
def test_settings_outside_what_is_allowed_are_refused(options, message):
    with tiny.as_installed(), pytest.raises(ValueError, match=message):
        MemoryConfig(**options)


def test_heads_of_their_own_need_a_size_that_they_can_share():
    with pytest.raises(ValueError, match="size=5 with phi='per_head': allowed are multiples of"):
        MemoryConfig(size=5, phi="per_head").shapes(HEADS, KV_HEADS, DIM)


def test_gradients_pass_through_every_part():
    for config in CONFIGS:
        params, given = parameters(config), entries(1)
        queries = jax.random.normal(jax.random.key(3), (ROWS, HEADS, 3, DIM))

        def loss(params, config=config, given=given, queries=queries):
            state = memory.write(config, params, empty(config), *given)
            m, mass = memory.read(config, params, state, queries)
            lse = jnp.zeros(mass.shape)
            out = memory.combine(config, queries, lse, m, mass, memory.gate(params, queries))
            return jnp.sum(jnp.square(out))

        for name, gradient in jax.jit(jax.grad(loss))(params).items():
            assert np.isfinite(gradient).all() and np.asarray(gradient).any(), name
