"""Data sets of the Hugging Face hub by name, where it can be reached: `hub:organisation/name`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.tasks.base import Absent

_PREFIX = "hub:"


def local(path: Path, names: Sequence[str]) -> Path:
    """`path` itself, or the folder that the files called `names` were downloaded to.

    Raises:
      Absent: the hub cannot be reached, or has no such data set.
    """
    if not str(path).startswith(_PREFIX):
        return path
    name = str(path).removeprefix(_PREFIX)
    try:
        import huggingface_hub
    except ImportError:
        raise Absent(
            f"{path}: needs huggingface_hub: pip install 'kvjax[hub]', or give a local file"
        ) from None
    patterns = [
        pattern
        for n in names
        for pattern in (f"{n}.*", f"*/{n}.*", f"{n}/*", f"{n}-*", f"*/{n}/*", f"*/{n}-*")
    ]
    try:
        return Path(
            huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=patterns)
        )
    except Exception as error:  # the client raises many kinds, all of which mean the same here
        reason = next(iter(str(error).splitlines()), "")
        raise Absent(
            f"{path}: not downloaded ({type(error).__name__}: {reason}); give a local file"
        ) from None
