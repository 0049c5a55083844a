"""Prefill with the prompt's tokens over devices: the same result, and a share of the memory."""

from __future__ import annotations

import json

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from kvjax import sequence_parallel
from kvjax.models.sharding import MESH_AXES
from tests.program import output_of
from tests.sharded_prefill import LONG, PROMPT

FLOAT = 4  # bytes


@pytest.fixture(scope="module")
def found():
    """What the program with eight devices prints."""
    return json.loads(output_of("tests.sharded_prefill"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    ["snapkv sequence", "h2o tensor", "h2o data", "retention-global all", "keydiff-block tensor"],
)
def test_prefill_over_a_mesh_equals_prefill_on_one_device(found, case):
    compared = found["compared"][case]
    assert compared["same positions"]
    assert compared["gap"] < 1e-5
    assert compared["state"] < 1e-4  # log retention goes up to 26 here


@pytest.mark.slow
def test_kernels_that_know_no_positions_attend_chunk_by_chunk(found):
    compared = found["compared"]["kernels"]
    assert compared["same positions"]
    assert compared["gap"] < 1e-5


@pytest.mark.slow
def test_the_cache_lies_over_rows_and_heads(found):
    where = {case: compared.get("keys") for case, compared in found["compared"].items()}
    assert where["snapkv sequence"] == [1, 1, 1, 1, 1]
    assert where["h2o tensor"] == [1, 1, 2, 1, 1]
    assert where["h2o data"] == [1, 2, 1, 1, 1]
    assert where["retention-global all"] == [2, 1, 1, 1]  # pages of a row serve all its heads


@pytest.mark.slow
def test_a_device_of_eight_needs_a_quarter_of_the_temporaries_at_most(found):
    programs = found["programs"]
    assert 4 * programs["eight"]["temporary"] < programs["one"]["temporary"]


@pytest.mark.slow
def test_devices_gather_keys_and_values_and_nothing_else_that_grows_with_the_width(found):
    exchanged = found["programs"]["eight"]["bytes"]
    layers, heads, size = LONG.num_layers, LONG.num_heads, LONG.head_dim
    entries = layers * PROMPT * 2 * LONG.num_kv_heads * size * FLOAT
    selection = layers * PROMPT * LONG.num_kv_heads * 3 * FLOAT  # running counts of what is kept
    assert entries <= exchanged["all-gather"] <= entries + selection
    # The queries out and what they found back, of an eighth of the tokens.
    dealt = layers * (PROMPT // 8) * heads * 2 * size * FLOAT
    assert dealt <= exchanged["collective-permute"] <= 1.1 * dealt
    # Scores, counts and the kept entries: far from one hidden state of the prompt.
    assert exchanged["all-reduce"] < PROMPT // 8 * LONG.hidden_size * FLOAT
    assert exchanged.keys() <= {"all-gather", "collective-permute", "all-reduce"}


def test_a_prompt_is_padded_to_chunks_that_kernels_take():
    mesh = AbstractMesh((1, 1, 1, 4), MESH_AXES, (AxisType.Auto,) * 4)
    lengths = {
        length: sequence_parallel.padded(jnp.zeros((1, length), jnp.int32), mesh).shape[1]
        for length in (1, 8, 45, 5000, 8200)
    }
    assert lengths == {1: 8, 8: 8, 45: 48, 5000: 5000, 8200: 9216}
    assert sequence_parallel.padded(jnp.zeros((1, 45)), None).shape == (1, 45)
