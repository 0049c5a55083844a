"""What is trained, and over how many devices, are questions of their own."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.program import output_of
from tests.train.kinds_over_meshes import KINDS, MESHES, STEPS


@pytest.fixture(scope="module")
def found():
    return json.loads(output_of("tests.train.kinds_over_meshes"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_mesh_gives_the_losses_of_one_device(found, kind):
    alone, *others = found[kind]
    assert len(alone) == STEPS and alone[0] != alone[1] and min(alone) > 0
    for mesh, losses in zip(MESHES[1:], others, strict=True):
        np.testing.assert_allclose(losses, alone, rtol=1e-5, atol=1e-5, err_msg=str(mesh))
