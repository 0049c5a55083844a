"""What the processes of one run agree on, and what only the first of them does.

Every function also serves a run of one process, where it costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def is_first() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Returns once every process is here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def as_first_says(answer: bool) -> bool:
    """The first process's answer, in all of them."""
    if jax.process_count() == 1:
        return answer
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(np.asarray(answer)))


def union(texts: Mapping[int, str]) -> dict[int, str]:
    """The numbered texts of all processes together; what several have is the same."""
    if jax.process_count() == 1:
        return dict(texts)
    import json

    from jax.experimental import multihost_utils

    mine = np.frombuffer(json.dumps(dict(texts)).encode(), np.uint8)
    longest = int(multihost_utils.process_allgather(np.asarray(mine.size)).max())
    padded = np.full(longest, ord(" "), np.uint8)
    padded[: mine.size] = mine
    found: dict[int, str] = {}
    for row in multihost_utils.process_allgather(padded):
        found |= {int(number): text for number, text in json.loads(bytes(row)).items()}
    return found


def whole(arrays: Any) -> Any:
    """A tree of arrays with every part of them in each process."""
    if jax.process_count() == 1:
        return arrays
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(arrays, tiled=True)
