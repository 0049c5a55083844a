"""A step is compiled from shapes alone, as it will run."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.models.sharding import make_mesh
from tests import tiny
from tests.train import tiny_run
from train.abstract import model_shapes, trace_step


def test_a_step_compiles_from_shapes_and_writes_its_state_in_place():
    settings = tiny_run.config("unused")
    mesh = make_mesh()
    model = model_shapes(tiny.model(num_layers=2).config, mesh, jnp.float32)
    lowered = trace_step(settings, model, mesh).lower()
    memory = lowered.compile().memory_analysis()
    state = jax.tree.leaves(lowered.in_avals[0][0])
    donated = sum(leaf.size * leaf.dtype.itemsize for leaf in state)
    assert memory.alias_size_in_bytes == donated
    assert memory.argument_size_in_bytes > donated
