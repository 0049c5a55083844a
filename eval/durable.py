"""Files that survive a kill and a power cut: replaced whole, or grown line by line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO, cast


def write_atomically(path: Path, text: str) -> None:
    """The file at `path` is the old one or the whole new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _opened(temporary, "w") as file:
            file.write(text)
            file.flush()
            # Before its name is: else a power cut may leave the new name on an empty file.
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def append(path: Path, lines: Iterable[str]) -> None:
    """One write and a sync, so that nothing appended is lost to a kill."""
    with _opened(path, "a") as file:
        file.write("".join(f"{line}\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file; what follows the last line break was cut short by a kill."""
    return path.read_bytes().split(b"\n")[:-1]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other processes from writing `path` until the end of the block, or of this process.

    Raises:
      ValueError: another one writes it now.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The file stays: who removed it could remove one that somebody else has just locked.
    with path.with_name(f".{path.name}.lock").open("w") as file:
        _lock(file.fileno(), path)
        yield


def _lock(descriptor: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: two commands on one directory are the user's to avoid
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{str(path.parent)!r}: another command is writing {path.name} there; wait for its "
            "end, or give another --output"
        ) from None
    except OSError:  # a file system without locks
        return


def _opened(path: Path, mode: str) -> TextIO:
    # Half of a surrogate pair, which JSON may hold, is written as JSON escapes it.
    return cast(TextIO, path.open(mode, encoding="utf-8", errors="backslashreplace"))


def _sync_directory(directory: Path) -> None:
    """The new name of a file is on the disk too, where directories can be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
