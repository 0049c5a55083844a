"""Bytes and decode speed of one budget for all heads, next to the same share for every head.

    python benchmarks/retention_cost.py

The paged cache of `retention-global` against that of `retention-local` and against the padded one,
same model, same total of entries, in turns of the same process. Writes retention_cost.json and .md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from vs_kvpress import ROOT, commit, machine

PAGE = 16
STEPS = 64  # twice what a row takes in before it is cut back
SIDES = {
    "retention-local, padded": ("retention-local", None),
    "retention-local, paged": ("retention-local", PAGE),
    "retention-global, paged": ("retention-global", PAGE),
}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import jax
    from perplexity import windows

    import kvjax
    from kvjax.budget import entry_nbytes

    model, tokenizer = kvjax.load(arguments.model)
    tokens = windows(tokenizer, 1, arguments.context, "prose")
    policies = {name: kvjax.policy(name) for name, _ in SIDES.values()}
    logits, full, observed = kvjax.observe(model, tokens, policies=list(policies.values()))
    budget = int(arguments.budget * arguments.context)
    wanted = budget * entry_nbytes(model.config, model.dtype)
    found: dict[str, Any] = {}
    runs: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {}
    for side, (name, pages) in SIDES.items():
        own = policies[name]
        kept = dataclasses.replace(
            own, schedule=dataclasses.replace(own.schedule, decode_interval=None)
        )
        arrays = kvjax.policy_params(model, own)
        shared = {"budget": budget, "params": arrays, "pages": pages}
        exact = kvjax.compress(model, full, observed, policy=kept, **shared)
        growing = kvjax.compress(model, full, observed, policy=kept, room=STEPS, **shared)
        evicting = kvjax.compress(model, full, observed, policy=own, **shared)
        going_on = {"policy": own, "budget": budget, "params": arrays}
        runs[side] = {"appending": (growing, {}), "evicting": (evicting, going_on)}
        lengths = np.asarray(exact.lengths)
        found[side] = {
            "bytes": kvjax.nbytes(exact),
            "bytes_of_budget": kvjax.nbytes(exact) / wanted,
            "entries": int(lengths.sum()),
            "least": int(lengths.min()),
            "most": int(lengths.max()),
            "seconds": {"appending": [], "evicting": []},
        }
    for number in range(arguments.rounds + 1):  # the first compiles and warms up
        for side, kinds in runs.items():
            for kind, (cache, going_on) in kinds.items():
                start = time.perf_counter()
                output = kvjax.generate(model, cache, logits, max_new_tokens=STEPS, **going_on)
                jax.block_until_ready(output.tokens)
                if number:
                    seconds = (time.perf_counter() - start) / STEPS
                    found[side]["seconds"][kind].append(seconds)
    return {
        "commit": commit(),
        "machine": machine(),
        "model": arguments.model,
        "context": arguments.context,
        "budget": budget,
        "rounds": arguments.rounds,
        "sides": found,
    }


def page(results: dict[str, Any]) -> str:
    sides = results["sides"]

    def middle(side: str, kind: str) -> float:
        return 1e3 * statistics.median(sides[side]["seconds"][kind])

    lines = [
        "# What one budget for all heads costs",
        "",
        f"{results['model']}, {results['context']} tokens of prose cut to {results['budget']} "
        f"entries per head on average, pages of {PAGE}; {STEPS} decode steps, one row, medians of "
        f"{results['rounds']} rounds in turns, {results['machine']}, commit {results['commit']}. "
        "Appending: new tokens stay beside the budget. Evicting: the policy cuts the row back to "
        "it whenever its buffer is full.",
        "",
        "| cache | entries of a head | bytes / budget | ms per step, appending | / local, paged "
        "| ms per step, evicting | / local, paged |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for side, one in sides.items():
        cells = [f"{side} | {one['least']} to {one['most']} | {one['bytes_of_budget']:.3f}"]
        for kind in ("appending", "evicting"):
            own = middle(side, kind)
            cells += [f"{own:.1f}", f"{own / middle('retention-local, paged', kind):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "Command: `python benchmarks/retention_cost.py`.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=7)
    output = ROOT / "docs" / "results" / "retention_cost"
    parser.add_argument("--output", type=Path, default=output)
    arguments = parser.parse_args()
    results = measure(arguments)
    arguments.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    arguments.output.with_suffix(".md").write_text(page(results), encoding="utf-8")
    print(page(results))


if __name__ == "__main__":
    main()
