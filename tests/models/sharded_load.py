"""Run by `test_sharding` in a process of its own, which has eight CPU devices."""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from kvjax.models.checkpoint import load
from kvjax.models.decoder import Decoder
from kvjax.models.hf_directory import HFDirectory
from kvjax.models.orbax import save
from kvjax.models.sharding import make_mesh
from tests.oracle import causal, dense_logits

TOKENS = np.arange(9, dtype=np.int32) * 5


def main(path: str) -> None:
    """Compare loads; the exit status says whether all is equal."""
    alone = load(path).model
    reads = []
    read = HFDirectory.read

    def recorded(self, parameter, layer, index):
        value = read(self, parameter, layer, index)
        reads.append((self.name(parameter, layer), value.size / math.prod(parameter.source_shape)))
        return value

    HFDirectory.read = recorded
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    spread = load(path, mesh=mesh).model

    shardings = Decoder.shardings(alone.config, mesh)
    jax.tree.map(lambda leaf, wanted: check(leaf.sharding, wanted), spread, shardings)
    compare(alone, spread)
    # Every matrix is read in quarters, each quarter once although two devices hold it.
    quarters = [part for name, part in reads if name.endswith("proj.weight")]
    if any(part > 0.25 for part in quarters):
        sys.exit(f"a device read more than its slice: {max(quarters)}")
    if len(quarters) != 4 * 7 * alone.config.num_layers:
        sys.exit(f"{len(quarters)} reads of matrices")

    mask = causal(alone, len(TOKENS))
    gap = np.abs(dense_logits(alone, TOKENS, mask) - dense_logits(spread, TOKENS, mask)).max()
    if gap > 1e-5:
        sys.exit(f"logits differ by {gap}")

    with tempfile.TemporaryDirectory() as directory:
        saved = save(spread, None, Path(directory) / "model")
        compare(alone, load(saved).model)
        compare(alone, load(saved, mesh=mesh).model)


def compare(one: Decoder, two: Decoder) -> None:
    """Exit unless weights and fingerprints agree."""
    for name, value in one.parameters.items():
        np.testing.assert_array_equal(value, two.parameters[name], err_msg=name)
    check(one.fingerprint(), two.fingerprint())


def check(found: object, wanted: object) -> None:
    """Exit unless both are equal."""
    if found != wanted:
        sys.exit(f"found {found}, wanted {wanted}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(sys.argv[1])
