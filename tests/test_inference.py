"""The door: what it accepts, and that everything else is one line that names the value."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Sampling
from tests import tiny
from tests.tiny import CAPACITY, LENGTHS, QUARTER


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.quick_compilation():
        yield


def array(values, dtype=jnp.int32):
    return jnp.asarray(values, dtype)


ROWS = array([[5, 6, 7], [8, 9, 0]])


def refused(call, *named):
    with tiny.as_installed(), pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for text in named:
        assert text in message, message


def prefill(tokens=ROWS, *args, **options):
    return kvjax.prefill(tiny.model(), tokens, *args, **{"capacity": 16} | options)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: prefill([]), ["empty prompt"]),
        (lambda: prefill([[]]), ["empty prompt"]),
        (lambda: prefill([[1, 2], []]), ["empty prompt"]),
        (lambda: prefill(ROWS, array([3, 0])), ["empty prompt"]),
        (lambda: prefill(ROWS, array([3, -1])), ["empty prompt"]),
        (lambda: prefill(ROWS, array([3, 4])), ["length 4", "3 columns"]),
        (lambda: prefill(ROWS, array([3])), ["lengths of shape (1,)", "2 rows"]),
        (lambda: prefill(ROWS, array([[3, 3]])[0][:1]), ["lengths of shape (1,)"]),
        (lambda: prefill([[1, 2]], array([2])), ["lengths"]),
        (lambda: prefill(array([1, 2, 3])[None, None][0, 0]), ["shape (3,)"]),
        (lambda: prefill(array([[1, 97]])), ["token id 97", "0 to 96"]),
        (lambda: prefill(array([[1, -1]])), ["token id -1"]),
        (lambda: prefill(array([[1]], jnp.float32)), ["float32", "integers"]),
        (lambda: prefill([[1, 2.5]]), ["float64", "integers"]),
        (lambda: prefill(np.ones((1, 8193), np.int32)), ["8193 tokens", "8192"]),
        (lambda: prefill(policy="snapvk"), ["'snapvk'", "snapkv"]),
        (lambda: prefill(policy="kvzip"), ["'kvzip'", "replay"]),
        (lambda: prefill(policy="knorm", budget=0), ["budget 0"]),
        (lambda: prefill(policy="knorm", budget=-3), ["budget -3"]),
        (lambda: prefill(policy="knorm", budget=1.5), ["1.5"]),
        (lambda: prefill(policy="knorm", budget="half"), ["'half'"]),
        (lambda: prefill(policy="knorm", budget=None), ["None"]),
        (lambda: prefill(policy="knorm", budget=array([0, 3])), ["budget 0"]),
        (lambda: prefill(policy="knorm", budget=array([1, 2, 3])), ["[1, 2, 3]", "2 rows"]),
        (lambda: prefill(policy="knorm", budget=np.array([0.5, 0.5])), ["[0.5, 0.5]"]),
        (lambda: prefill(policy="knorm", room=-1, capacity=None), ["room -1"]),
        (lambda: prefill(policy="knorm", capacity=0), ["capacity 0"]),
        (lambda: prefill(policy="full", capacity=2), ["capacity 2", "'full'", "3 entries"]),
        (lambda: prefill(policy="knorm", capacity=1, budget=2), ["capacity 1", "'knorm'"]),
        (lambda: prefill(policy="qfilters"), ["'qfilters'", "filters"]),
    ],
)
def test_bad_prompts_budgets_and_policies_are_refused_by_name(call, named):
    refused(call, *named)


def test_layers_with_a_window_need_its_slots():
    ids = array(tiny.tokens())
    refused(
        lambda: kvjax.prefill(
            tiny.model(), ids, array(LENGTHS), policy="knorm", budget=2, capacity=8
        ),
        "capacity 8",
        "12 entries",
    )


def step(tokens=None, **options):
    _, cache = tiny.full()
    tokens = array([[1], [2], [3]]) if tokens is None else tokens
    return kvjax.extend(tiny.model(), cache, tokens, **options)


def generate(**options):
    logits, cache = tiny.full()
    options = {"max_new_tokens": 2, "logits": logits, "cache": cache} | options
    return kvjax.generate(tiny.model(), **options)


h2o = tiny.policy("h2o", decode_interval=2)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: step(array([[1]])), ["1 rows", "has 3"]),
        (lambda: step(array([[97], [1], [1]])), ["token id 97"]),
        (lambda: step(array(np.ones((3, 17)))), ["17 tokens", "room for 16", "64"]),
        (lambda: step(policy=h2o), ["budget"]),
        (lambda: step(policy=h2o, budget=0.5), ["budget 0.5"]),
        (lambda: step(policy=h2o, budget=0), ["budget 0"]),
        (lambda: step(policy=h2o, budget=4), ["'h2o'", "attention_mass"]),
        (lambda: step(policy=h2o, budget=4, interval=0), ["interval 0"]),
        (lambda: generate(max_new_tokens=0), ["max_new_tokens 0"]),
        (lambda: generate(max_new_tokens=17), ["17 tokens", "room for 16"]),
        (lambda: generate(logits=jnp.zeros((3, 96))), ["(3, 96)", "(3, 97)"]),
        (lambda: generate(policy=h2o, budget=4), ["'h2o'", "attention_mass"]),
        (lambda: generate(sampling=Sampling(temperature=0.5)), ["temperature 0.5", "key"]),
        (lambda: next(stream(block=0)), ["block 0"]),
        (lambda: next(stream(max_new_tokens=0)), ["max_new_tokens 0"]),
    ],
)
def test_bad_continuations_are_refused_by_name(call, named):
    refused(call, *named)


def stream(**options):
    logits, cache = tiny.full()
    return kvjax.stream(tiny.model(), cache, logits, **{"max_new_tokens": 4} | options)


def test_a_cache_of_another_model_is_refused():
    logits, cache = tiny.full()
    other = tiny.model(num_layers=2)
    refused(
        lambda: kvjax.extend(other, cache, array([[1], [1], [1]])), "another model", "(3, 2, 8)"
    )
    refused(
        lambda: kvjax.generate(tiny.model("bfloat16"), cache, logits, max_new_tokens=1),
        "float32",
        "bfloat16",
    )


def test_a_chunked_prefill_cannot_be_shared():
    policies = [tiny.policy("snapkv", prefill="chunked")]
    refused(
        lambda: kvjax.observe(tiny.model(), ROWS, policies=policies),
        "'snapkv'",
        "chunked",
    )


def test_lists_arrays_and_padding_mean_the_same_prompt():
    rows = [tiny.tokens()[row, : LENGTHS[row]].tolist() for row in range(3)]
    policy = tiny.policy("knorm")
    wanted_logits, wanted = tiny.prefill(tiny.tokens(), LENGTHS, QUARTER, policy)
    poisoned = tiny.tokens().copy()
    for row in range(3):
        poisoned[row, LENGTHS[row] :] = 96  # padding is of any value
    common = {"policy": policy, "budget": array(QUARTER), "capacity": CAPACITY}
    for prompt in ((rows,), (poisoned, LENGTHS), (array(poisoned), LENGTHS.tolist())):
        logits, cache = kvjax.prefill(tiny.model(), *prompt, **common)
        np.testing.assert_array_equal(logits, wanted_logits)
        jax.tree.map(np.testing.assert_array_equal, cache, wanted)


def test_a_budget_means_the_same_as_fraction_percentage_tokens_or_entries():
    ids, policy = tiny.tokens(), tiny.policy("knorm")
    _, wanted = tiny.prefill(ids, LENGTHS, QUARTER, policy)
    prompt = (tiny.model(), array(ids), array(LENGTHS))
    for budget in (0.25, "25%", "0.25", kvjax.Budget(fraction=0.25)):
        _, cache = kvjax.prefill(*prompt, policy=policy, budget=budget, capacity=CAPACITY)
        np.testing.assert_array_equal(cache.positions, wanted.positions)
    size = 12 * kvjax.budget.entry_nbytes(tiny.CONFIG, jnp.float32)
    _, tokens = tiny.prefill(ids, LENGTHS, np.array([12, 12, 7]), policy)
    for budget in (12, "12", f"{size}B"):
        _, cache = kvjax.prefill(*prompt, policy=policy, budget=budget, capacity=CAPACITY)
        np.testing.assert_array_equal(cache.positions, tokens.positions)


def test_the_default_capacity_is_the_budget_the_room_and_no_more():
    ids, lengths = array(tiny.tokens()), array(LENGTHS)
    model = tiny.model()

    def capacity(**options):
        shape = jax.eval_shape(lambda t: kvjax.prefill(model, t, lengths, **options)[1], ids)
        return shape.capacity

    assert capacity(policy=tiny.policy("knorm"), budget=array([20, 5, 5])) == 20
    assert capacity(policy=tiny.policy("knorm"), budget=array([20, 5, 5]), room=7) == 27
    assert capacity(policy=tiny.policy("knorm"), budget=array([4, 4, 4])) == 12  # a layer's window
    assert capacity(policy="full", budget=array(LENGTHS), room=3) == 51
    rolling = tiny.policy("streaming", decode_interval=5)
    assert capacity(policy=rolling, budget=array([20, 5, 5])) == 24


def test_calls_inside_jit_may_close_over_concrete_arrays():
    policy = tiny.policy("knorm")
    logits, cache = tiny.prefill(tiny.tokens(), LENGTHS, QUARTER, policy)

    @jax.jit
    def go(model):
        kvjax.prefill(
            model,
            array(tiny.tokens()),
            array(LENGTHS),
            policy=policy,
            budget=array(QUARTER),
            capacity=CAPACITY,
        )
        return kvjax.generate(model, cache, logits, max_new_tokens=2).tokens

    wanted = kvjax.generate(tiny.model(), cache, logits, max_new_tokens=2).tokens
    np.testing.assert_array_equal(go(tiny.model()), wanted)
