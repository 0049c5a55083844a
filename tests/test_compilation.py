"""What is compiled, how often, how large it is, and which memory it needs."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import assembly, decoding
from tests import tiny
from tests.tiny import CAPACITY, LENGTHS, PROMPT, QUARTER

COMPILED = "/jax/core/compile/backend_compile_duration"
compilations: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: compilations.append(event) if event == COMPILED else None
)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.quick_compilation():
        yield


@contextmanager
def no_compilation():
    before = len(compilations)
    yield
    assert len(compilations) == before, "something was compiled again"


def narrow(num_layers: int = 2) -> kvjax.ModelConfig:
    return dataclasses.replace(tiny.CONFIG, num_layers=num_layers, windows=())


def arrays(*values):
    return [jnp.asarray(value) for value in values]


def test_prompts_and_budgets_of_one_bucket_share_every_compilation():
    policy = tiny.policy("snapkv", decode_interval=0)
    bucket = kvjax.bucket_length(PROMPT)

    def run(seed, lengths, budget, entries):
        tokens = jnp.asarray(tiny.tokens(seed, 3, bucket))
        logits, cache = kvjax.prefill(
            tiny.model(), tokens, jnp.asarray(lengths), policy=policy, budget=budget, room=16
        )
        logits, cache = kvjax.prefill(
            tiny.model(),
            tokens,
            jnp.asarray(lengths),
            policy=policy,
            budget=jnp.asarray(entries),
            capacity=cache.capacity,
        )
        logits, cache = kvjax.extend(tiny.model(), cache, tokens[:, :5], jnp.array([5, 2, 3]))
        return kvjax.generate(tiny.model(), cache, logits, max_new_tokens=4).tokens

    first = run(0, LENGTHS, 0.25, QUARTER)
    with no_compilation():
        second = run(1, LENGTHS // 2 + 1, 0.25, QUARTER)
        run(2, LENGTHS, 16, QUARTER // 2 + 1)
    assert (np.asarray(first) != np.asarray(second)).any()


def test_steps_of_an_evicting_cache_share_one_compilation_for_every_budget():
    policy = tiny.policy("streaming", decode_interval=2)
    model = tiny.model(num_layers=2)
    extend = partial(kvjax.extend, model, policy=policy)

    def run(budget):
        logits, cache = kvjax.prefill(
            model,
            *arrays(tiny.tokens(), LENGTHS),
            policy=policy,
            budget=jnp.asarray(budget),
            capacity=20,
        )
        for _ in range(3):
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)[:, None]
            logits, cache = extend(cache, token, budget=jnp.asarray(budget))

    run(QUARTER)
    with no_compilation():
        run(QUARTER + 5)
        run(np.array([1, 1, 1], np.int32))


def equations(jaxpr) -> int:
    """Equations of a jaxpr and of everything inside it."""
    total = 0
    for equation in jaxpr.eqns:
        total += 1
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += equations(inner)
    return total


@pytest.mark.parametrize("name", ["snapkv"])
def test_programs_do_not_grow_with_depth(name):
    def sizes(layers):
        model = tiny.model(num_layers=layers)
        policy = tiny.policy(name, decode_interval=4)
        prefill = partial(kvjax.prefill, policy=policy, capacity=20)
        inputs = arrays(tiny.tokens(), LENGTHS)
        budget = jnp.asarray(QUARTER)
        _, cache = jax.eval_shape(lambda *a: prefill(*a, budget=budget), model, *inputs)
        step = partial(decoding.extend, policy=policy, budget=budget)
        return (
            equations(jax.make_jaxpr(lambda *a: prefill(*a, budget=budget))(model, *inputs).jaxpr),
            equations(
                jax.make_jaxpr(step)(
                    model, cache, jnp.ones((3, 1), jnp.int32), jnp.ones(3, jnp.int32)
                ).jaxpr
            ),
        )

    assert sizes(2) == sizes(8)
    assert min(sizes(2)) > 100  # the equations inside scans are counted


def memory(function, *inputs, donate=()):
    compiled = jax.jit(function, donate_argnums=donate).lower(*inputs).compile()
    return compiled.memory_analysis()


def test_memory_of_a_chunked_prefill_is_budget_and_chunk_for_any_prompt():
    chunk, budget = 64, 64
    model = kvjax.Decoder.random(narrow(), jax.random.key(0))
    policy = tiny.policy("h2o", prefill="chunked", chunk=chunk, decode_interval=0)

    def peak(length, chunks):
        run = partial(
            kvjax.prefill,
            policy=dataclasses.replace(
                policy, schedule=dataclasses.replace(policy.schedule, prefill=chunks)
            ),
            capacity=budget,
        )
        tokens = jnp.ones((1, length), jnp.int32)
        found = memory(
            lambda *a: run(*a, budget=jnp.array([budget])), model, tokens, jnp.array([length])
        )
        return found.temp_size_in_bytes + found.output_size_in_bytes

    short, long = peak(1024, "chunked"), peak(4096, "chunked")
    assert long - short <= 3 * 4 * (4096 - 1024)  # three copies of the token ids at most
    entry = kvjax.budget.entry_nbytes(model.config, jnp.float32)
    assert peak(4096, "whole") - peak(1024, "whole") > entry * 1024  # what chunks avoid


@pytest.mark.parametrize("name", [None, "h2o", "snapkv"])
def test_a_donated_cache_is_updated_in_place(name):
    policy = None if name is None else tiny.policy(name, decode_interval=4)
    model = kvjax.Decoder.random(narrow(), jax.random.key(0))
    cache = assembly.empty_cache(model, 2, 512, policy)

    def step(model, cache, tokens, lengths, budget):
        return decoding.extend(model, cache, tokens, lengths, budget=budget, policy=policy)

    found = memory(
        step,
        model,
        cache,
        jnp.ones((2, 1), jnp.int32),
        jnp.ones(2, jnp.int32),
        jnp.array([64, 64]),
        donate=1,
    )
    assert found.alias_size_in_bytes == kvjax.nbytes(cache)
    if policy is None:
        assert found.temp_size_in_bytes < kvjax.nbytes(cache)


def test_reported_bytes_are_the_sum_of_the_arrays():
    _, cache = tiny.full()
    heads = 3 * 3 * 2
    wanted = heads * CAPACITY * (2 * 8 * 4 + 4) + heads * 4 + 3 * 4 + 3 * 4
    assert kvjax.nbytes(cache) == wanted
    assert kvjax.nbytes(cache) == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
