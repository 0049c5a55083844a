"""`kvjax eval`: runs a config and writes results.json, results.md and report.html."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Compare policies and budgets on tasks. Every policy answers the same samples from one shared
prefill per sample. Prints a table per haystack; writes samples.jsonl as it goes, then
results.json, results.md and report.html. A killed run goes on where it was when the same
command is given again."""
EXAMPLE = "kvjax eval --config configs/demo.yaml --haystack book.txt --output runs/book"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--config", metavar="FILE", help="YAML file that says what to run")
    parser.add_argument(
        "--haystack",
        metavar="FILE",
        help="hide the needles in this UTF-8 text instead of the config's haystacks",
    )
    parser.add_argument("--output", metavar="DIR", help="directory of the results")
    parser.add_argument(
        "--samples",
        metavar="N",
        type=int,
        help="samples for every haystack, length and depth instead of the config's",
    )
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume", action="store_true", help="refuse to start anew: DIR must hold a run"
    )
    existing.add_argument(
        "--overwrite", action="store_true", help="drop the results that DIR holds"
    )
    parser.add_argument("--list", action="store_true", help="show tasks, haystacks and policies")
    parser.add_argument(
        "--dry-run", action="store_true", help="check the config and show what would run"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the evaluation; 1 where no answer at all came out, else 0.

    Raises:
      ValueError, OSError: bad input, before anything is written.
    """
    if args.list:
        return _list()
    config = _config(args)
    directory = Path(config.output)
    _check_output(directory, args)

    from eval import engine

    policies = engine.build_policies(config.policies)
    if args.dry_run:
        return _dry_run(config, tuple(policies))

    import kvjax
    from eval import harness, report, tables
    from eval.progress import Printer

    loaded = kvjax.load(config.model)
    if loaded.tokenizer is None:
        raise ValueError(f"model {config.model!r} has no tokenizer: eval needs one beside it")
    runner = engine.KvjaxEngine(loaded, policies)
    results = harness.run(config, runner, Printer(), directory, args.overwrite)
    paths = report.write(results, directory)
    print(tables.text(results))
    print(f"\n{tables.NOTES}")
    for path in paths:
        print(path)
    failed, total = len(results.failures), sum(len(s.records) for s in results.samples)
    if failed:
        print(f"{failed} of {total} answers failed; the report lists them", file=sys.stderr)
    return 1 if failed == total else 0


def _config(args: argparse.Namespace) -> Any:
    from eval import config as config_module
    from eval import haystacks

    if args.config is None:
        raise ValueError("eval needs --config FILE (see kvjax eval --help)")
    config = config_module.load(args.config)
    if args.samples is not None:
        if args.samples < 1:
            raise ValueError(f"--samples={args.samples}: allowed: integers >= 1")
        tasks = tuple(dataclasses.replace(t, samples=args.samples) for t in config.tasks)
        config = dataclasses.replace(config, tasks=tasks)
    if args.haystack is not None:
        names = (f"file:{args.haystack}",)
        tasks = tuple(dataclasses.replace(t, haystacks=names) for t in config.tasks)
        config = dataclasses.replace(config, tasks=tasks)
    if args.output is not None:
        if not args.output.strip():
            raise ValueError(f"--output={args.output!r}: allowed: a directory")
        config = dataclasses.replace(config, output=args.output)
    for name in {name for task in config.tasks for name in task.haystacks}:
        haystacks.load(name)
    return config


def _check_output(directory: Path, args: argparse.Namespace) -> None:
    from eval.records import SAMPLES_FILE

    parent = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise ValueError(f"output {str(directory)!r}: {parent} is not a directory")
    if args.resume and not (directory / SAMPLES_FILE).exists():
        raise ValueError(f"--resume: {str(directory)!r} holds no run; leave --resume out")


def _list() -> int:
    import kvjax
    from eval import haystacks
    from eval.tasks import TASKS

    print("tasks")
    for task in TASKS.values():
        print(f"  {task.name:<12} {task.summary}")
    print(f"haystacks\n  {', '.join(haystacks.KINDS)}, file:PATH")
    print("policies\n  " + ", ".join(dict.fromkeys(("full", *kvjax.policy_names()))))
    return 0


def _dry_run(config: Any, labels: tuple[str, ...]) -> int:
    """What would run; the model is not loaded, so lengths and bytes are checked by the run."""
    evicting = len(labels) - 1
    answers = config.num_samples * (1 + evicting * len(config.budgets))
    print(f"model      {config.model}")
    for task in config.tasks:
        lengths = ", ".join(map(str, task.lengths))
        depths = ", ".join(f"{depth:g}" for depth in task.depths)
        print(f"task       {task.name}: {', '.join(task.haystacks)}")
        print(f"           lengths {lengths}; depths {depths}; {task.samples} samples each")
    print(f"policies   {', '.join(labels)}")
    print(f"budgets    {', '.join(map(str, config.budgets))}")
    print(f"question   {config.question}")
    print(f"prefills   {config.num_samples}")
    print(f"answers    {answers}")
    print(f"output     {config.output}")
    return 0
