"""What is equal to the bit, in the code that XLA makes by default."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BITS = Path(__file__).parent / "bits"


def test_what_is_promised_to_the_bit_is_kept_in_the_code_that_users_get():
    """In a process of its own: XLA reads its flags once."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(BITS),
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"XLA_FLAGS": ""},
        cwd=BITS.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
