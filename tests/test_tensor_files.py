"""Tensor files: who may read them."""

from __future__ import annotations

import os
import stat

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvjax.tensor_files import write_tensors


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "x", {"a": np.arange(3.0)}, {"k": "v"})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == mode
    np.testing.assert_array_equal(load_file(tmp_path / "x")["a"], np.arange(3.0))
