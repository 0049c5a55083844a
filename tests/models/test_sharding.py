"""Shardings follow the layout table; a sharded load equals the unsharded one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from kvjax.models.layout import layout
from kvjax.models.orbax import export_hf
from kvjax.models.sharding import ShardingRules, make_mesh
from tests.models.small import CONFIGS, random_model

SCRIPT = Path(__file__).with_name("sharded_load.py")


def specs(name, **sizes):
    axes = ("data", "fsdp", "tensor", "sequence")
    shape = tuple(sizes.get(axis, 1) for axis in axes)
    mesh = AbstractMesh(shape, axes, (AxisType.Auto,) * 4)
    rules = ShardingRules()
    return {row.name: rules.spec(row.axes, row.units, mesh) for row in layout(CONFIGS[name])}


def test_projections_split_over_fsdp_and_tensor():
    found = specs("llama", fsdp=2, tensor=2)
    assert found["layers.q_proj"] == PartitionSpec(None, "fsdp", "tensor")
    assert found["layers.o_proj"] == PartitionSpec(None, "tensor", "fsdp")
    assert found["layers.down_proj"] == PartitionSpec(None, "tensor", "fsdp")
    assert found["embedding"] == PartitionSpec("tensor", "fsdp")
    assert found["lm_head"] == PartitionSpec("fsdp", "tensor")


def test_heads_are_never_cut():
    found = specs("llama", tensor=4)
    assert found["layers.q_proj"] == PartitionSpec(None, "fsdp", "tensor")
    assert found["layers.k_proj"] == PartitionSpec(None, "fsdp", None)


def test_unknown_axes_and_missing_devices_are_named():
    with pytest.raises(ValueError, match="'model'"):
        make_mesh(model=2)
    with pytest.raises(ValueError, match="a mesh of 4096 devices"):
        make_mesh(tensor=4096)


def test_a_load_sharded_over_eight_devices_equals_the_unsharded_one(tmp_path):
    path = export_hf(random_model("qwen2"), None, tmp_path / "model", max_shard_bytes=30_000)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.sharded_load", str(path)],
        cwd=SCRIPT.parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
