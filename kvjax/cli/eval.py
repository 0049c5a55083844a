"""`kvjax eval`: runs a config and writes results.json, results.md and report.html."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from kvjax.cli import cluster, eval_erasing

DESCRIPTION = """\
Compare policies and budgets on tasks. Every policy answers the same samples from one shared
prefill per context. Prints a table per task and length; writes samples.jsonl as it goes, then
results.json, results.md and report.html. A killed run goes on where it was when the same
command is given again. A config with methods instead of policies evaluates erasing."""
EXAMPLE = "kvjax eval --config configs/demo.yaml --haystack book.txt --output runs/book"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--config", metavar="FILE", help="YAML file that says what to run")
    parser.add_argument("--model", metavar="MODEL", help="model instead of the config's")
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
        help="samples of every cell (contexts of every file) instead of the config's",
    )
    parser.add_argument(
        "--lengths", metavar="N,...", help="prompt lengths of generated tasks, in tokens"
    )
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=int, help="length of every answer, in tokens"
    )
    parser.add_argument(
        "--batch",
        metavar="N",
        type=int,
        help="contexts of one length that run together; default one per device, or 8 of erasing",
    )
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="run every N-th context only, from the I-th (0-based): N commands share a run",
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
        "--dry-run",
        action="store_true",
        help="check the config and show what would run and about how long it takes",
    )
    cluster.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the evaluation; 1 where no answer at all came out, else 0.

    Raises:
      ValueError, OSError: bad input, before anything is written.
    """
    if args.list:
        return _list()
    if args.batch is not None and args.batch < 1:
        raise ValueError(f"--batch={args.batch}: allowed: integers >= 1")
    cluster.join(args)
    if args.config is not None and eval_erasing.takes(args.config):
        return eval_erasing.run(args)
    shard = _shard(args.shard)
    if args.overwrite and shard[1] > 1:
        parts = f"{shard[1]} processes" if args.shard is None else f"--shard {args.shard}"
        raise ValueError(
            f"--overwrite with {parts}: it would drop what the other parts wrote; "
            "delete the directory before the first of them starts"
        )
    configs = _configs(args)
    for config in configs:
        _check_output(Path(config.output), args)

    from eval import engine

    policies = engine.build_policies(configs[0].policies)
    if args.dry_run:
        for config in configs:
            _dry_run(config, tuple(policies), args.overwrite)
        return 0
    return max(_run(config, policies, args, shard) for config in configs)


def _run(config: Any, policies: Any, args: argparse.Namespace, shard: tuple[int, int]) -> int:
    import jax

    import kvjax
    from eval import engine, harness, merge, report, tables
    from eval.progress import Printer
    from kvjax import processes

    directory = Path(config.output)
    loaded = kvjax.load(config.model)
    if loaded.tokenizer is None:
        raise ValueError(f"model {config.model!r} has no tokenizer: eval needs one beside it")
    runner = engine.KvjaxEngine(loaded, policies)
    results = harness.run(
        config,
        runner,
        Printer(),
        directory,
        args.overwrite,
        batch=args.batch or len(jax.local_devices()),
        shard=shard,
    )
    processes.wait_for_all("evaluated")
    if jax.process_count() > 1 and processes.is_first():
        results = merge.read(directory).results  # what the others wrote too
    if shard[1] > 1 and not (jax.process_count() > 1 and processes.is_first()):
        print(f"{directory}: part {shard[0]} of {shard[1]} is done; kvjax report merges the parts")
    else:
        paths = report.write(results, directory)
        print(tables.text(results))
        print(f"\n{tables.NOTES}")
        for path in paths:
            print(path)
    _warn(results)
    failed, total = len(results.failures), sum(len(s.records) for s in results.samples)
    # A part of the run may have no context at all.
    return 1 if 0 < failed == total else 0


def _warn(results: Any) -> None:
    """What a reader of the scores has to know, one line each."""
    for task, reason in results.absent:
        print(f"{task} is absent: {reason}", file=sys.stderr)
    if cut := sum(s.cut_tokens > 0 for s in results.samples):
        print(
            f"{cut} of {len(results.samples)} contexts were too long: their middle was cut",
            file=sys.stderr,
        )
    if failed := len(results.failures):
        total = sum(len(s.records) for s in results.samples)
        print(f"{failed} of {total} answers failed; the report lists them", file=sys.stderr)


def _configs(args: argparse.Namespace) -> list[Any]:
    """The configs of the file, one per model, with what the command line changes."""
    from eval import config as config_module
    from eval import haystacks

    if args.config is None:
        raise ValueError("eval needs --config FILE (see kvjax eval --help)")
    if args.samples is not None and args.samples < 1:
        raise ValueError(f"--samples={args.samples}: allowed: integers >= 1")
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens={args.max_new_tokens}: allowed: integers >= 1")
    if args.output is not None and not args.output.strip():
        raise ValueError(f"--output={args.output!r}: allowed: a directory")
    configs = config_module.load_all(args.config, args.model)
    if args.output is not None and len(configs) > 1:
        raise ValueError(f"--output={args.output!r}: the config has several models; add --model")
    changed = []
    for config in configs:
        tasks = tuple(_changed(task, args) for task in config.tasks)
        output = config.output if args.output is None else str(Path(args.output).expanduser())
        new = args.max_new_tokens or config.max_new_tokens
        changed.append(dataclasses.replace(config, tasks=tasks, output=output, max_new_tokens=new))
        for name in {name for task in tasks for name in task.haystacks}:
            haystacks.load(name)
    return changed


def _changed(task: Any, args: argparse.Namespace) -> Any:
    from eval.tasks import TASKS

    changes: dict[str, Any] = {}
    if args.samples is not None:
        changes["samples"] = args.samples
    if TASKS[task.name].make is not None:
        if args.haystack is not None:
            changes["haystacks"] = (f"file:{args.haystack}",)
        if args.lengths is not None:
            changes["lengths"] = _lengths(args.lengths)
    return dataclasses.replace(task, **changes)


def _lengths(given: str) -> tuple[int, ...]:
    parts = given.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--lengths={given!r}: allowed: integers >= 1 with commas between them")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _shard(given: str | None) -> tuple[int, int]:
    """The part of this command: as told, or this process's of those that joined."""
    import jax

    if given is None:
        return jax.process_index(), jax.process_count()
    if jax.process_count() > 1:
        raise ValueError(
            f"--shard={given!r}: {jax.process_count()} processes share the run already"
        )
    match = re.fullmatch(r"(\d+)/(\d+)", given)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"--shard={given!r}: allowed: I/N with 0 <= I < N, for example 0/4")
    return int(match[1]), int(match[2])


def _check_output(directory: Path, args: argparse.Namespace) -> None:
    from eval.journal import journals

    parent = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise ValueError(f"output {str(directory)!r}: {parent} is not a directory")
    if args.resume and not journals(directory):
        raise ValueError(f"--resume: {str(directory)!r} holds no run; leave --resume out")


def _list() -> int:
    import kvjax
    from eval import haystacks
    from eval.erasing.suites import SUITES
    from eval.tasks import TASKS
    from kvjax.erasing import METHODS

    print("tasks")
    for task in TASKS.values():
        print(f"  {task.name:<14} {task.summary}")
        if task.subsets:
            print(f"  {'':<14} subsets: {', '.join(task.subsets)}")
    print(f"haystacks\n  {', '.join(haystacks.KINDS)}, file:PATH")
    print(f"suites of erasing\n  {', '.join(SUITES)}")
    print("policies\n  " + ", ".join(dict.fromkeys(("full", *kvjax.policy_names()))))
    print("methods of erasing\n  " + ", ".join(METHODS))
    return 0


def _dry_run(config: Any, labels: tuple[str, ...], overwrite: bool) -> None:
    """What would run; the model is not loaded, so lengths and bytes are checked by the run."""
    from eval import planning

    # Four characters a token: enough to read every file and to make one sample of each kind.
    plan = planning.plan(config, lambda *texts: sum(map(len, texts)) // 4)
    evicting = len(labels) - 1
    contexts = plan.contexts()
    answers = len(plan.samples) * (1 + evicting * len(config.budgets))
    print(f"model      {config.model}")
    for task in dict.fromkeys(s.task for s in plan.samples):
        mine = [s for s in plan.samples if s.task == task]
        lengths = dict.fromkeys(str(s.length) for s in mine if s.length is not None)
        depths = dict.fromkeys(f"{s.depth:g}" for s in mine if s.depth is not None)
        parts = [", ".join(dict.fromkeys(s.haystack for s in mine))]
        parts += [f"lengths {', '.join(lengths)}"] if lengths else []
        parts += [f"depths {', '.join(depths)}"] if depths else []
        print(f"task       {task}: {'; '.join([*parts, f'{len(mine)} samples'])}")
    for task, reason in plan.absent:
        print(f"absent     {task}: {reason}")
    print(f"policies   {', '.join(labels)}")
    print(f"budgets    {', '.join(map(str, config.budgets))}")
    print(f"question   {config.question}")
    print(f"prefills   {len(contexts)}")
    print(f"answers    {answers}")
    print(f"output     {config.output}")
    print(f"time       {_time(config, plan, evicting, overwrite)}")


def _time(config: Any, plan: Any, policies: int, overwrite: bool) -> str:
    import jax

    from eval import estimate
    from eval.journal import Journal
    from eval.progress import duration
    from kvjax.models import weights
    from kvjax.models.checkpoint import read_config

    finished = {} if overwrite else Journal(config.output, config).read().whole
    wanted = {sample.id for sample in plan.samples}
    done = [result for name, result in finished.items() if name in wanted]
    left = len(wanted) - len(done)
    if (seconds := estimate.measured(done, left)) is not None:
        return f"{duration(seconds)} for {left} samples, as the {len(done)} before them took"
    try:
        model = read_config(config.model)
    except (FileNotFoundError, ValueError) as error:
        return f"unknown ({error})"
    dtype = weights.default_dtype()
    speed = estimate.Speed.measure(model, dtype)
    seconds = estimate.predicted(config, plan, model, policies, speed, dtype.itemsize)
    return (
        f"at most about {duration(seconds)} on this {jax.devices()[0].device_kind}, if every "
        "answer runs to its full length; compilation not counted"
    )
