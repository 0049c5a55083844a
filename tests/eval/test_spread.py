"""A batch over several devices answers as on one."""

from __future__ import annotations

import json
import subprocess
import sys


def test_eight_devices_keep_and_answer_what_one_does():
    done = subprocess.run(
        [sys.executable, "-m", "tests.eval.spread_run"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    one, eight = json.loads(done.stdout).values()
    assert one["said"] == eight["said"] and one["kept"] == eight["kept"]
    assert (one["devices"], eight["devices"]) == (1, 8)
    # Every device holds one row of the full cache [L, B, K, S, D].
    assert (one["share"][1], eight["share"][1]) == (8, 1)
