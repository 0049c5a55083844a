"""The files that a config's paths stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

ROWS = (".jsonl", ".json", ".parquet")
PLAIN = (".txt", ".md")


def expand(paths: Sequence[str], endings: Sequence[str]) -> list[Path]:
    """Every file once, in the order of `paths`; those of a directory or a glob sorted.

    A directory stands for all files below it that have one of `endings`.

    Raises:
      ValueError: a path without a file.
    """
    found: dict[Path, None] = {}
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            files = [p for p in path.rglob("*") if p.suffix in endings and p.is_file()]
            missing = f"has no file that ends in {', '.join(endings)}"
        elif path.is_file():
            files, missing = [path], ""
        else:
            files = [p for p in _matching(path) if p.is_file()]
            missing = "no such file or directory, and no file matches it"
        if not files:
            raise ValueError(f"{given}: {missing}; a file, a directory or a glob is needed")
        found.update(dict.fromkeys(sorted(files)))
    return list(found)


def _matching(pattern: Path) -> Iterator[Path]:
    root = Path(pattern.anchor)
    return root.glob(str(pattern.relative_to(root)))
