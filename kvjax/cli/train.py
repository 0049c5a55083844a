"""`kvjax train`: trains a side module beside a frozen model and exports it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from kvjax.cli import cluster

DESCRIPTION = """\
Train a learned policy for a frozen model: what CONFIG says, with checkpoints as it goes. The same
command resumes a run where its newest checkpoint is. At the end the module is written to
OUTPUT/export, which kvjax.load_policy reads and policies take as path=."""
EXAMPLE = "kvjax train configs/retention_smollm2.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file that says what to train")
    parser.add_argument("--output", metavar="DIR", help="directory of the run")
    parser.add_argument("--steps", metavar="N", type=int, help="steps instead of the config's")
    parser.add_argument(
        "--dry-run", action="store_true", help="check the config and make one batch, then stop"
    )
    cluster.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Trains; 1 where the run ended early, with everything saved that can be.

    Raises:
      ValueError, OSError: bad input, before anything is written.
    """
    from train import config as config_module

    config = config_module.load(args.config)
    if args.steps is not None:
        if args.steps < 1:
            raise ValueError(f"--steps={args.steps}: allowed: integers >= 1")
        config = dataclasses.replace(config, steps=args.steps)
    if args.output is not None:
        if not args.output.strip():
            raise ValueError(f"--output={args.output!r}: allowed: a directory")
        config = dataclasses.replace(config, output=args.output)

    cluster.join(args)

    from kvjax import processes
    from train.loop import EXPORT, Stopped, train

    recipe, model, shards = prepared(config)
    if args.dry_run:
        return _dry_run(config, recipe, model, next(shards))
    try:
        state = train(config, recipe, model, shards)
    except Stopped as stopped:
        print(f"kvjax train: {stopped}", file=sys.stderr)
        return 1
    directory = Path(config.output) / EXPORT
    params = processes.whole(state.params)
    recipe.export(params, model, directory, facts(config))  # the first process writes
    if processes.is_first():
        print(f"{directory}: exported after {config.steps} steps")
    processes.wait_for_all("exported")
    return 0


def prepared(config: Any) -> tuple[Any, Any, Any]:
    """Recipe, model and this process's data of a run."""
    import kvjax
    from train import data, devices
    from train.claim import data_shards
    from train.recipes import recipe_of

    mesh = devices.mesh_of(config.mesh, config.batch, config.length)
    loaded = kvjax.load(config.model, mesh=mesh)
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise ValueError(f"model {config.model!r} has no tokenizer: training needs one beside it")
    shards = data.Shards(
        data_shards(config),
        config.batch,
        devices.local_rows(mesh, config.batch, config.length),
        lambda index, count: data.build(
            config.data,
            tokenizer,
            length=config.length,
            batch=config.batch // count,
            seed=config.seed,
            process=(index, count),
        ),
    )
    return recipe_of(config), loaded.model, shards


def facts(config: Any) -> dict[str, Any]:
    """What a card says of the training."""
    import json

    content = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    del content["output"]
    return content


def _dry_run(config: Any, recipe: Any, model: Any, batch: Any) -> int:
    import jax

    shapes = jax.eval_shape(lambda key: recipe.init(model, key), jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    print(f"model       {config.model}")
    print(f"module      {config.kind}, {count:,} parameters")
    print(f"steps       {config.steps} of {config.batch} x {config.length} tokens")
    filled = float((batch["segments"] >= 0).mean())
    print(f"first batch {100 * filled:.0f} % filled, {100 * batch['labels'].mean():.0f} % labelled")
    print(f"output      {config.output}")
    return 0
