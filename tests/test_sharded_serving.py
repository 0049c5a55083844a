"""Prompt, question and decoding over rows and heads on several devices, as on one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests import tiny
from tests.program import output_of
from tests.sharded_serving import POLICIES, STEPS


@pytest.fixture(scope="module")
def found():
    """What the program with eight devices prints."""
    return json.loads(output_of("tests.sharded_serving"))


@pytest.mark.parametrize("name", POLICIES)
def test_a_mesh_says_and_keeps_what_one_device_does(found, name):
    alone, over_mesh = found["served"][name]
    assert np.shape(alone["tokens"]) == (2, STEPS)
    np.testing.assert_allclose(over_mesh["logits"], alone["logits"], atol=1e-4)
    assert over_mesh["tokens"] == alone["tokens"]
    assert over_mesh["lengths"] == alone["lengths"]


def test_a_decode_step_sums_two_products_of_each_layer_and_moves_no_entry(found):
    decode = found["decode"]
    assert set(decode["count"]) == {"all-reduce"} and decode["unknown"] == 0
    layers, rows = tiny.CONFIG.num_layers, 4 // 2
    assert decode["count"]["all-reduce"] == 2 * layers + 1  # and the embedded token
    assert decode["bytes"]["all-reduce"] <= (2 * layers + 1) * rows * 4 * tiny.CONFIG.hidden_size
