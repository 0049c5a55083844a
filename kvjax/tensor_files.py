"""Writing safetensors files that others may read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np


def write_tensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file with the permissions of any new file.

    The library writes beside it with those of a temporary file, which only its owner may read.
    A file that is there is replaced and keeps its permissions.
    """
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    path.chmod(mode)
