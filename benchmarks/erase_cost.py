"""What an edit costs as the text behind the passage grows.

    python benchmarks/erase_cost.py [--eraser DIRECTORY]

One prefix, one span, suffixes of growing length; every method edits the same cache in place, in
turns of the same process. Writes erase_cost.json and .md. Time to first token is the edit and a
question of 32 tokens behind it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from vs_kvpress import ROOT, commit, machine

PREFIX, SPAN, QUESTION = 256, 64, 32
SUFFIXES = (512, 1024, 2048, 4096)
METHODS: dict[str, dict[str, Any]] = {
    "kveraser": {},
    "hybrid": {"tokens": 16},
    "mask": {},
    "delete-and-shift": {},
    "local-repair": {"tokens": 64},
    "cacheblend": {},
    "recompute": {},
}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import jax

    import kvjax

    model = kvjax.load(arguments.model).model
    if arguments.eraser is None:
        eraser = kvjax.load_eraser(model)
    else:
        eraser = kvjax.load_eraser(model, arguments.eraser)
    draw = np.random.default_rng(0)
    longest = PREFIX + SPAN + max(SUFFIXES)
    ids = draw.integers(1000, 40000, (1, longest), dtype=np.int32)
    question = draw.integers(1000, 40000, (1, QUESTION), dtype=np.int32)
    span = (PREFIX, PREFIX + SPAN)
    methods = {name: kvjax.erasing_method(name, **given) for name, given in METHODS.items()}
    seconds: dict[str, dict[str, list[list[float]]]] = {name: {} for name in METHODS}
    for suffix in SUFFIXES:
        tokens = ids[:, : PREFIX + SPAN + suffix]
        _, full = kvjax.prefill(model, tokens, room=QUESTION)
        for number in range(arguments.rounds + 1):  # the first compiles and warms up
            for name, method in methods.items():
                used = eraser if method.needs_eraser else None
                cache = jax.block_until_ready(jax.tree.map(lambda array: array.copy(), full))
                start = time.perf_counter()
                edited = kvjax.erase(model, used, cache, tokens, span, method=method, donate=True)
                jax.block_until_ready(edited)
                middle = time.perf_counter()
                jax.block_until_ready(kvjax.extend(model, edited, question)[0])
                end = time.perf_counter()
                if number:
                    seconds[name].setdefault(str(suffix), []).append([middle - start, end - start])
    return {
        "commit": commit(),
        "machine": machine(),
        "model": arguments.model,
        "rounds": arguments.rounds,
        "seconds": seconds,
    }


def page(results: dict[str, Any]) -> str:
    lines = [
        "# What erasing costs",
        "",
        f"{results['model']}, a span of {SPAN} tokens behind {PREFIX}, padded cache edited in "
        f"place; medians of {results['rounds']} rounds in turns, {results['machine']}, commit "
        f"{results['commit']}. Behind the slash: time to the first token of a reply, a question of "
        f"{QUESTION} tokens included.",
        "",
        "| method | " + " | ".join(f"{suffix} behind, ms" for suffix in SUFFIXES) + " | growth |",
        "|---|" + "--:|" * (len(SUFFIXES) + 1),
    ]
    for name, by_suffix in results["seconds"].items():
        middles = [
            [1e3 * statistics.median(part) for part in zip(*by_suffix[str(suffix)], strict=True)]
            for suffix in SUFFIXES
        ]
        cells = [f"{edit:.1f} / {first:.1f}" for edit, first in middles]
        growth = middles[-1][0] / middles[0][0]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {growth:.2f}x |")
    return "\n".join([*lines, "", "Command: `python benchmarks/erase_cost.py`.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--eraser", metavar="DIRECTORY", help="default: the one that ships")
    parser.add_argument("--rounds", type=int, default=7)
    output = ROOT / "docs" / "results" / "erase_cost"
    parser.add_argument("--output", type=Path, default=output)
    arguments = parser.parse_args()
    results = measure(arguments)
    arguments.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    arguments.output.with_suffix(".md").write_text(page(results), encoding="utf-8")
    print(page(results))


if __name__ == "__main__":
    main()
