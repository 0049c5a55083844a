"""`kvjax eval` with a config of erasing: methods instead of policies."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

_FOREIGN = ("haystack", "lengths", "shard")
_CHANGES = ("model", "output", "samples", "max_new_tokens")


def takes(path: str) -> bool:
    """Whether the file is such a config."""
    from eval import fields
    from eval.erasing.config import is_erasing

    return is_erasing(fields.yaml_file(path))


def run(args: argparse.Namespace) -> int:
    """Runs it and prints its page; 1 where every sample failed, else 0.

    Raises:
      ValueError, OSError: bad input, before anything is written.
    """
    import jax

    if jax.process_count() > 1:
        raise ValueError(
            f"{jax.process_count()} processes: a config of erasing runs in one; give each its file"
        )
    from eval.erasing import measure, records, tables
    from eval.erasing import run as erasing_run
    from eval.journal import SAMPLES_FILE
    from eval.progress import Printer

    config = _config(args)
    methods = measure.labelled(config.methods)
    measure.check(methods)
    plan = list(erasing_run.planned(config))
    if args.dry_run:
        cells = len({cell for _, _, cell in plan})
        print(f"{len(plan)} samples in {cells} cells under {', '.join(methods)}")
        return 0
    import kvjax

    loaded = kvjax.load(config.model)
    if loaded.tokenizer is None:
        raise ValueError(f"model {config.model!r} has no tokenizer: eval needs one beside it")
    size = 8 if args.batch is None else args.batch
    results = erasing_run.run(config, loaded, Printer(), args.overwrite, size)
    directory = Path(config.output)
    path, page = tables.write(records.read(directory / SAMPLES_FILE), directory, results)
    print(page)
    print(path)
    return 1 if all(result.error is not None for result in results) else 0


def _config(args: argparse.Namespace) -> Any:
    """The file's config with what the command line changes."""
    from eval import fields
    from eval.erasing import config as erasing_config
    from eval.journal import journals

    for name in _FOREIGN:
        if getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: not taken with a config of erasing; change the file")
    config = erasing_config.load(args.config)
    changes = {name: v for name in _CHANGES if (v := getattr(args, name)) is not None}
    if "output" in changes:
        changes["output"] = fields.directory("--output", changes["output"])
    for name in ("samples", "max_new_tokens"):
        if changes.get(name, 1) < 1:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}={changes[name]}: allowed: integers >= 1")
    config = dataclasses.replace(config, **changes)
    if args.resume and not journals(Path(config.output)):
        raise ValueError(f"--resume: {config.output!r} holds no run; leave --resume out")
    return config
