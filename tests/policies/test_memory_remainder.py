"""A memory of evicted entries through prefill, chunks, questions and decoding."""

from __future__ import annotations

import dataclasses
from functools import cache as memoised
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import assembly, decoding
from kvjax.cache.entries import entry_positions
from kvjax.dilution import useful_mass
from kvjax.learned.memory import MemoryConfig
from tests import tiny
from tests.learned import memory_by_hand as by_hand
from tests.policies.observations import rotate
from tests.policies.remembering import (
    ASKED,
    CONFIGS,
    QUESTION,
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
from tests.tiny import CAPACITY, LENGTHS, QUARTER

NAMES = ("snapkv", "retention-global")
every_kind = pytest.mark.parametrize(
    ("name", "config"),
    [("retention-global", CONFIGS[0]), *(("snapkv", config) for config in CONFIGS)],
    ids=str,
)
either_schedule = pytest.mark.parametrize(
    ("name", "interval"), [("snapkv", 3), ("retention-global", 0)]
)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.quick_compilation():
        yield


# One layer by hand: no residual stream in between, so every number has a definition of its own.


@memoised
def one_layer() -> kvjax.Decoder:
    return tiny.model(num_layers=1)


def projected(tokens, positions):
    """What the only layer makes of tokens [T]: pre-RoPE queries, queries, keys, values."""
    model = one_layer()
    layer = jax.tree.map(lambda array: array[0], model.layers)
    x = model.embed(jnp.asarray(tokens)[None])
    new = layer.project(x, *model.rotation(jnp.asarray(positions, jnp.int32)[None]))
    arrays = (new.queries_pre_rope, new.queries, new.keys, new.values)
    return x, layer, [np.asarray(array[0], np.float64) for array in arrays]


def expected_logits(config, arrays, state, cached, tokens, first):
    """Logits behind the last of `tokens`, which stand from position `first` on."""
    x, layer, (raw, queries, keys, values) = projected(tokens, first + np.arange(len(tokens)))
    held_keys, held_values, held = cached
    out = np.zeros(queries.shape)
    group = queries.shape[0] // keys.shape[0]
    for head, token in np.ndindex(*queries.shape[:2]):
        own = head // group
        alive = held[own] >= 0
        k = np.concatenate([held_keys[own][alive], keys[own][: token + 1]])
        v = np.concatenate([held_values[own][alive], values[own][: token + 1]])
        z = k @ queries[head, token] / np.sqrt(queries.shape[-1])
        out[head, token] = np.exp(z - z.max()) @ v / np.exp(z - z.max()).sum()
    for token in range(len(tokens)):
        lse = np.zeros(queries.shape[0])
        for head in range(queries.shape[0]):
            own = head // group
            k = np.concatenate([held_keys[own][held[own] >= 0], keys[own][: token + 1]])
            z = k @ queries[head, token] / np.sqrt(queries.shape[-1])
            lse[head] = z.max() + np.log(np.exp(z - z.max()).sum())
        asked = (raw if config.coordinates == "pre_rope" else queries)[:, token]
        m, mass = by_hand.read(config, arrays, state, asked)
        gates = by_hand.gate(arrays, asked)
        out[:, token] = by_hand.combine(config, out[:, token], lse, m, mass, gates)
    x = layer.finish(x, jnp.asarray(out[None], jnp.float32))
    return np.asarray(one_layer().logits(x[:, -1]))[0]


def written(config, arrays, state, entries, evicted):
    """One row's memory after a cut of `entries` (keys after RoPE, values, positions)."""
    keys, values, positions = entries
    if config.coordinates == "pre_rope":
        frequencies = np.asarray(one_layer().rope_frequencies[0], np.float64)
        keys = rotate(keys, -np.maximum(positions, 0), frequencies)
    return by_hand.write(
        config, arrays, state, keys, values, positions, evicted, tiny.CONFIG.num_heads
    )


def row_of(cache, row):
    """Keys, values and positions of one row of a padded cache of one layer."""
    arrays = [np.asarray(array)[0, row] for array in (cache.keys, cache.values, cache.positions)]
    return arrays[0].astype(np.float64), arrays[1].astype(np.float64), arrays[2]


def gone(before, after):
    """[K, S]: entries of `before` whose position is in no slot of the same head afterwards."""
    return np.stack([~np.isin(b, a) & (b >= 0) for b, a in zip(before, after, strict=True)])


def check_memory(cache, row, state):
    found = memory_of(cache)
    for name, wanted in zip(("values", "squares"), state, strict=True):
        np.testing.assert_allclose(found[name][0, row], wanted, atol=1e-4, err_msg=name)


@every_kind
def test_a_prompt_and_its_question_by_hand(name, config):
    policy, given = remembering(name, config), params(name, config, 1)
    arrays = {key: np.asarray(a[0], np.float64) for key, a in given["memory"].items()}
    _, cache = prefill(policy, given, model=one_layer())
    logits, after = ask(policy, given, cache, model=one_layer())
    same(after.policy_state.memory, cache.policy_state.memory)
    for row, length in enumerate(LENGTHS):
        tokens = tiny.tokens()[row, :length]
        *_, (_, _, keys, values) = projected(tokens, np.arange(length))
        positions = np.broadcast_to(np.arange(length), keys.shape[:2])
        evicted = gone(positions, row_of(cache, row)[2])
        empty = [np.zeros(a.shape[2:]) for a in list(memory_of(cache).values())]
        by_name = dict(zip(memory_of(cache), empty, strict=True))
        state = (by_name["values"], by_name["squares"])
        state = written(config, arrays, state, (keys, values, positions), evicted)
        check_memory(cache, row, state)
        assert memory_of(cache)["newest"][0, row] == positions[evicted].max(initial=-1)
        asked = QUESTION[row, : ASKED[row]]
        wanted = expected_logits(config, arrays, state, row_of(cache, row), asked, length)
        np.testing.assert_allclose(logits[row], wanted, atol=2e-4)


@pytest.mark.parametrize(
    ("config", "chunk"), [(config, (1, 7)[i % 2]) for i, config in enumerate(CONFIGS)], ids=str
)
def test_every_call_reads_what_the_cuts_before_it_wrote(chunk, config):
    """Decode steps and chunks alike: one cut, one decay, and no reading of one's own cut."""
    policy = remembering("snapkv", config, decode_interval=3)
    given = params("snapkv", config, 1)
    arrays = {key: np.asarray(a[0], np.float64) for key, a in given["memory"].items()}
    _, cache = prefill(policy, given, model=one_layer(), capacity=26)
    ids, cuts = tiny.tokens(9, 3, 7 if chunk == 1 else 4 * chunk), 0
    for start in range(0, ids.shape[1], chunk):
        counts = jnp.full(3, chunk, jnp.int32).at[1].set(max(0, chunk - 1))
        logits, after = kvjax.extend(
            one_layer(), cache, jnp.asarray(ids[:, start : start + chunk]), counts,
            policy=policy, params=given, budget=jnp.asarray(QUARTER),
        )  # fmt: skip
        for row in range(3):
            count, first = int(counts[row]), int(cache.next_position[row])
            if count == 0:
                same(kvjax.take_rows(after, [row]), kvjax.take_rows(cache, [row]))
                continue
            tokens = ids[row, start : start + count]
            state = tuple(memory_of(cache)[name][0, row] for name in ("values", "squares"))
            held = row_of(cache, row)
            wanted = expected_logits(config, arrays, state, held, tokens, first)
            np.testing.assert_allclose(logits[row], wanted, atol=3e-4)
            place = first + np.arange(count)
            *_, (_, _, keys, values) = projected(tokens, place)
            spread = np.broadcast_to(place, keys.shape[:2])
            union = [
                np.concatenate(pair, axis=1)
                for pair in zip(held, (keys, values, spread), strict=True)
            ]
            evicted = gone(union[2], row_of(after, row)[2])
            cuts += bool(evicted.any())
            check_memory(after, row, written(config, arrays, state, union, evicted))
        cache = after
    assert cuts > 3


# Whether it is read.


@pytest.mark.parametrize("name", NAMES)
def test_an_open_gate_is_not(name):
    policy, given = remembering(name), params(name)
    logits, _ = ask(policy, given, prefill(policy, given)[1])
    bare, own = plain(policy), given["scorer"]
    wanted = ask(bare, own, prefill(bare, own)[1])[0]
    assert np.abs(np.asarray(logits) - np.asarray(wanted))[:2].max() > 1e-2


# Layers, heads and rows.


def test_a_sliding_window_layer_writes_nothing():
    policy, given = remembering("snapkv"), params("snapkv")
    memory = memory_of(prefill(policy, given)[1])
    assert tiny.CONFIG.windows[1] is not None
    assert not memory["values"][1].any() and memory["values"][[0, 2], 0].any()


def test_the_two_steps_of_a_global_cut_are_one_event():
    """With a map for every head they even write the same, whatever the step takes."""
    config = MemoryConfig(phi="per_head", size=8, decay=0.5)
    policy, given = remembering("retention-global", config), params("retention-global", config)
    _, direct = prefill(policy, given)
    fullest = int(np.asarray(direct.lengths).max())
    _, stepped = prefill(policy, given, capacity=fullest)
    same(stepped.lengths, direct.lengths)
    for name, array in memory_of(direct).items():
        np.testing.assert_allclose(memory_of(stepped)[name], array, atol=1e-4)


@either_schedule
def test_rows_are_independent_of_each_other(name, interval):
    policy, given = remembering(name, decode_interval=interval), params(name)
    logits, cache = prefill(policy, given)
    found = ask(policy, given, kvjax.take_rows(cache, [1, 1, 0]))[1]
    again = ask(policy, given, kvjax.stack_rows([kvjax.take_rows(cache, [i]) for i in (2, 1, 0)]))
    same(memory_of(kvjax.take_rows(found, [1])), memory_of(kvjax.take_rows(again[1], [1])))
    out = answer(policy, given, logits, cache)
    one = kvjax.generate(
        tiny.model(), kvjax.take_rows(cache, [1]), logits[1:2], max_new_tokens=6,
        policy=policy, params=given, budget=jnp.asarray(QUARTER[1:2]),
    )  # fmt: skip
    same(out.tokens[1], one.tokens[0])
    for key, array in memory_of(out.cache).items():
        np.testing.assert_allclose(array[:, 1], memory_of(one.cache)[key][:, 0], atol=1e-5)


# Chunked prefill, shared prefill, paged caches, files.


@pytest.mark.parametrize("interval", [0, 4])
def test_chunks_write_and_read_as_extensions_do(interval):
    policy = remembering("snapkv", prefill="chunked", chunk=16, decode_interval=interval)
    given = params("snapkv")
    logits, cache = prefill(policy, given)
    walked = assembly.empty_cache(tiny.model(), 3, CAPACITY, policy)
    for start in range(0, 48, 16):
        counts = np.clip(LENGTHS - start, 0, 16).astype(np.int32)
        now, walked = kvjax.extend(
            tiny.model(), walked, jnp.asarray(tiny.tokens()[:, start : start + 16]),
            jnp.asarray(counts), policy=policy, params=given, budget=jnp.asarray(QUARTER),
            interval=1,
        )  # fmt: skip
    np.testing.assert_allclose(logits[0], now[0], atol=1e-5)
    for name, array in memory_of(walked).items():
        np.testing.assert_allclose(memory_of(cache)[name], array, atol=1e-5)
    assert bool(cache.policy_state.own) == bool(interval)


@pytest.mark.parametrize("name", NAMES)
def test_a_shared_prefill_writes_what_a_prefill_writes(name):
    policy, given = remembering(name), params(name)
    inputs = [jnp.asarray(a) for a in (tiny.tokens(), LENGTHS)]
    _, whole, seen = kvjax.observe(tiny.model(), *inputs, policies=[policy])
    assert not whole.policy_state.memory
    for capacity in (CAPACITY, 30):
        found = kvjax.compress(
            tiny.model(), whole, seen, policy=policy, budget=jnp.asarray(QUARTER),
            capacity=capacity, params=given,
        )  # fmt: skip
        _, wanted = prefill(policy, given, capacity=capacity)
        for key, array in memory_of(wanted).items():
            np.testing.assert_allclose(memory_of(found)[key], array, atol=1e-5)


@either_schedule
def test_a_paged_cache_remembers_the_same(name, interval):
    policy, given = remembering(name, decode_interval=interval), params(name)
    found = prefill(policy, given, pages=kvjax.Pages(size=4, pool=80, per_head=16))
    wanted = prefill(policy, given)
    for step in (found, wanted):
        assert memory_of(step[1])["values"].any()
    found, wanted = (ask(policy, given, one[1]) for one in (found, wanted))
    found, wanted = (answer(policy, given, *one) for one in (found, wanted))
    same(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.logits, wanted.logits, atol=1e-5)
    for key, array in memory_of(wanted.cache).items():
        np.testing.assert_allclose(memory_of(found.cache)[key], array, atol=1e-5)


def test_a_file_keeps_the_memory_and_knows_what_wrote_it(tmp_path):
    policy, given = remembering("snapkv"), params("snapkv")
    model, (_, cache) = tiny.model(), prefill(policy, given)
    path = kvjax.save_cache(cache, tmp_path / "cache", model=model, policy=policy, params=given)
    same(kvjax.load_cache(path, model=model, policy=policy, params=given), cache)
    other = remembering("snapkv", MemoryConfig(combine="convex"))
    with pytest.raises(ValueError, match="residual"):
        kvjax.load_cache(path, model=model, policy=other, params=given)
    with pytest.raises(ValueError, match="learned arrays"):
        kvjax.load_cache(path, model=model, policy=policy, params=closed(given))


def test_going_back_is_refused_where_the_memory_knows_what_came_later():
    policy, given = remembering("snapkv"), params("snapkv")
    _, cache = prefill(policy, given)
    _, after = ask(policy, given, cache)
    back = kvjax.rollback(after, cache.next_position)
    same(memory_of(back), memory_of(cache))
    same(ask(policy, given, back)[0], ask(policy, given, cache)[0])
    early = jnp.asarray(LENGTHS - 6)
    with pytest.raises(ValueError, match="rollback to 42: the memory holds evicted tokens up to"):
        kvjax.rollback(after, early)
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(kvjax.rollback)(after, early)
    with pytest.raises(ValueError, match="rerotate: this cache carries a memory"):
        kvjax.rerotate(tiny.model(), cache)


# Compilation and size.


def test_a_donated_cache_is_updated_in_place_and_steps_share_a_compilation():
    traces = []
    policy, given = remembering("snapkv", decode_interval=4), params("snapkv", layers=2)
    model = tiny.model(num_layers=2)
    once = remembering("snapkv")
    for one in (policy, once):
        cache = assembly.empty_cache(model, 2, 64, one)
        if one is once:
            cache = dataclasses.replace(cache, policy_state=cache.policy_state.without_policy())

        def step(cache, tokens, params, one=one):
            traces.append(one)
            return decoding.extend(
                model, cache, tokens, jnp.ones(2, jnp.int32), budget=jnp.array([8, 8]),
                policy=one, params=params,
            )  # fmt: skip

        jitted, token = jax.jit(step, donate_argnums=0), jnp.ones((2, 1), jnp.int32)
        compiled = jitted.lower(cache, token, given).compile()
        size = kvjax.nbytes(cache)
        assert compiled.memory_analysis().alias_size_in_bytes == size
        before = len(traces)
        for _ in range(14):
            _, cache = jitted(cache, token, given)
        assert len(traces) == before
        assert kvjax.nbytes(cache) == size
        assert memory_of(cache)["values"].any() == (one is policy)


def test_bytes_count_the_memory():
    policy, given = remembering("snapkv"), params("snapkv")
    cache, bare = prefill(policy, given)[1], prefill(plain(policy), None)[1]
    size, width = 4 * 8 // 8, 2 * 8
    assert kvjax.nbytes(cache) - kvjax.nbytes(bare) == 3 * 3 * 4 * (size * width + size + 1)


# Refusals, one line each.


@memoised
def refusals() -> dict[str, Any]:
    policy, given = remembering("snapkv"), params("snapkv")
    bare = plain(policy)
    _, cache = prefill(policy, given)
    _, without = prefill(bare, None)
    token, logits = jnp.ones((3, 1), jnp.int32), jnp.zeros((3, 97))
    other = remembering("snapkv", MemoryConfig(size=6))
    wrong = {"memory": tiny.memory(MemoryConfig(size=6)), "scorer": None}
    on = {"max_new_tokens": 1}
    model = tiny.model()
    inside = np.zeros((3, 48), bool)
    return {
        "extend": (lambda: kvjax.extend(model, cache, token), "carries a memory"),
        "extend bare": (lambda: kvjax.extend(model, cache, token, policy=bare), "carries a memory"),
        "generate": (lambda: kvjax.generate(model, cache, logits, **on), "carries a memory"),
        "likelihood": (lambda: kvjax.log_likelihood(model, cache, logits, token), "carries a mem"),
        "dilution": (
            lambda: useful_mass(model, cache, token, jnp.ones(3, jnp.int32), inside),
            "carries a memory",
        ),
        "no memory": (
            lambda: kvjax.extend(model, without, token, policy=policy, params=given),
            "'snapkv' reads a memory of shapes .* carries none",
        ),
        "other memory": (
            lambda: kvjax.extend(model, cache, token, policy=other, params=wrong),
            "reads a memory of shapes",
        ),
        "no params": (
            lambda: kvjax.extend(model, cache, token, policy=policy),
            r"needs params \{'scorer': \.\.\., 'memory': \.\.\.\}, given is NoneType",
        ),
        "bare params": (
            lambda: prefill(policy, given["memory"]),
            r"given is \['gate_b1', 'gate_b2', 'gate_w1', 'gate_w2', 'phi'\]: take them from",
        ),
        "wrong params": (
            lambda: prefill(policy, wrong),
            r"memory parameters: given are .* phi \[3, 16, 6\]; .* need .* phi \[3, 16, 4\]",
        ),
        "no arrays": (
            lambda: prefill(policy, {"scorer": None, "memory": None}),
            "memory parameters: given are none",
        ),
    }


@pytest.mark.parametrize(
    "case",
    ["extend", "extend bare", "generate", "likelihood", "dilution", "no memory", "other memory",
     "no params", "bare params", "wrong params", "no arrays"],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_in_one_line(case):
    call, message = refusals()[case]
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_likelihood_and_dilution_read_the_memory():
    policy, given = remembering("snapkv"), params("snapkv")
    logits, cache = prefill(policy, given)
    out = answer(policy, given, logits, cache)
    own = {"policy": policy, "params": given}
    tokens = jnp.concatenate([jnp.argmax(logits, axis=-1)[:, None].astype(jnp.int32)] * 2, axis=1)
    log_p = kvjax.log_likelihood(tiny.model(), cache, logits, tokens, **own)
    behind, _ = kvjax.extend(tiny.model(), cache, tokens[:, :1], **own)
    wanted = jax.nn.log_softmax(behind)[jnp.arange(3), tokens[:, 1]]
    np.testing.assert_allclose(log_p[:, 1], wanted, atol=1e-4)
    assert out.tokens.shape == (3, 6)
    counts, useful = jnp.ones(3, jnp.int32), np.ones((3, 60), bool)
    mass = useful_mass(tiny.model(), cache, tokens[:, :1], counts, useful, **own)
    closed_mass = useful_mass(
        tiny.model(), cache, tokens[:, :1], counts, useful, policy=policy, params=closed(given)
    )
    np.testing.assert_array_equal(mass[0], closed_mass[0])  # the first layer's input is the same
    assert np.abs(np.asarray(mass - closed_mass))[1:].max() > 1e-4


def test_positions_of_the_memory_cover_what_was_evicted():
    policy, given = remembering("snapkv", decode_interval=3), params("snapkv")
    out = answer(policy, given, *prefill(policy, given, capacity=26))
    held, seen = np.asarray(entry_positions(out.cache)), np.asarray(out.cache.next_position)
    for layer, row in np.ndindex(3, 3):
        newest = memory_of(out.cache)["newest"][layer, row]
        if layer == 1:
            assert newest == -1
            continue
        lost = [np.setdiff1d(np.arange(seen[row]), held[layer, row, head]) for head in (0, 1)]
        assert newest == max(np.concatenate(lost), default=-1)
