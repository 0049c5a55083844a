"""`kvjax report`: results.json, results.md and report.html from the journals of runs."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = """\
Write the report of one or several runs of `kvjax eval`, finished or not; the model is not needed.
Of a directory of `kvjax train` it draws the run.
Shards of a run are taken together. Runs of the same model, protocol and seed are merged sample by
sample, so that policies from different runs stand side by side; runs that differ in those get
parts of their own on one page. A run of erasing is reported alone."""
EXAMPLE = "kvjax report runs/snapkv runs/h2o --output runs/both"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="output directory of kvjax eval")
    parser.add_argument(
        "--output", metavar="DIR", help="directory of the report; of one RUN, that directory"
    )


def run(args: argparse.Namespace) -> None:
    """Reads everything before it writes anything.

    Raises:
      ValueError, OSError: runs that cannot be read or that disagree; no directory to write to.
    """
    if args.output is None and len(args.runs) > 1:
        raise ValueError(f"report of {len(args.runs)} runs: --output DIR is needed")
    output = Path(args.runs[0] if args.output is None else args.output)
    if args.output is not None and not args.output.strip():
        raise ValueError(f"--output={args.output!r}: allowed: a directory")

    from eval import merge, report, tables
    from eval.erasing import records as erasing_records
    from eval.erasing import tables as erasing_tables
    from eval.journal import SAMPLES_FILE
    from train import report as train_report

    if len(args.runs) == 1 and train_report.is_run(Path(args.runs[0])):
        print(train_report.write(Path(args.runs[0])))
        return

    # A directory given twice is one run.
    directories = {path.resolve(): path for path in map(Path, args.runs)}
    if erasing := [path for path in directories.values() if erasing_records.is_run(path)]:
        if len(directories) > 1:
            raise ValueError(f"run {str(erasing[0])!r} is of erasing: give it alone")
        path, page = erasing_tables.write(erasing_records.read(erasing[0] / SAMPLES_FILE), output)
        print(page)
        print(path)
        return
    results = merge.merge([merge.read(path) for path in directories.values()])
    if not any(part.samples for part in results):
        raise ValueError(f"{', '.join(args.runs)}: no sample is finished yet")
    paths = report.write(results, output)
    print(tables.text(results))
    print(f"\n{tables.NOTES}")
    for path in paths:
        print(path)
