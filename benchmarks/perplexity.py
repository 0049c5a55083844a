"""Perplexity of plain text that follows an evicted context, next to that of the full cache.

    python benchmarks/perplexity.py --output docs/results/perplexity

Prose that no gate was trained on: windows of the prose haystack, each from another place. Every
policy cuts the context's cache to the budget, then reads the same continuation; one prefill
serves all of them. Writes OUTPUT.json and OUTPUT.md: mean log-likelihoods, perplexities, and their
ratio to the full cache's with a paired bootstrap over windows.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from vs_kvpress import ROOT, commit, machine

BUDGETS = (0.5, 0.25, 0.125)
RESAMPLES = 10_000


def windows(tokenizer: Any, count: int, length: int, haystack: str) -> list[list[int]]:
    """Stretches of `length` tokens, each from a place of its own."""
    from eval import haystacks

    source = haystacks.load(haystack)
    found = []
    for number in range(count):
        stream, tokens, text = source.stream(random.Random(f"perplexity/{number}")), [], ""
        while len(tokens) < length:
            text += "".join(next(stream) for _ in range(20))
            tokens = tokenizer.encode(text, add_special_tokens=True)
        found.append(tokens[:length])
    return found


def ratio(log_p: np.ndarray, full: np.ndarray) -> tuple[float, float, float]:
    """exp of the mean difference of mean log-likelihoods, with a paired 95 % interval."""
    difference = full - log_p
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(difference), (RESAMPLES, len(difference)))
    low, high = np.percentile(difference[drawn].mean(axis=1), [2.5, 97.5])
    return tuple(math.exp(x) for x in (difference.mean(), low, high))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import kvjax
    from kvjax.cli.options import policy_of

    model, tokenizer = kvjax.load(arguments.model)
    policies = {}
    for given in arguments.policy:
        name, _, settings = given.partition(":")
        policies[given] = policy_of(name, [s for s in settings.split(",") if s])
    arrays = {name: kvjax.policy_params(model, policy) for name, policy in policies.items()}
    length = arguments.context + arguments.continuation
    found: dict[str, list[float]] = {}
    for number, tokens in enumerate(windows(tokenizer, arguments.n, length, arguments.haystack)):
        start = time.perf_counter()
        context = [tokens[: arguments.context]]
        continuation = np.asarray([tokens[arguments.context :]], np.int32)
        logits, full, observed = kvjax.observe(model, context, policies=list(policies.values()))
        log_p = kvjax.log_likelihood(model, full, logits, continuation)
        found.setdefault("full", []).append(float(log_p.mean()))
        for name, policy in policies.items():
            for budget in BUDGETS:
                cache = kvjax.compress(
                    model, full, observed, policy=policy, budget=budget, params=arrays[name]
                )
                log_p = kvjax.log_likelihood(model, cache, logits, continuation)
                found.setdefault(f"{name} {budget}", []).append(float(log_p.mean()))
        print(f"[{number + 1}/{arguments.n}] {time.perf_counter() - start:.1f} s", flush=True)
    return {
        "commit": commit(),
        "machine": machine(),
        "arguments": vars(arguments) | {"output": str(arguments.output)},
        "log_likelihood": found,
    }


def page(results: dict[str, Any]) -> str:
    given, found = results["arguments"], results["log_likelihood"]
    full = np.asarray(found["full"])
    lines = [
        "# Perplexity after eviction",
        "",
        f"{given['haystack'].capitalize()}, a context of {given['context']} tokens and "
        f"{given['continuation']} that follow, n = {given['n']} windows, {given['model']}, commit "
        f"{results['commit']}. Perplexity with the full cache: {math.exp(-full.mean()):.2f}. The "
        "table has ratios to it, with 95 % paired bootstrap intervals over windows; 1.000 is no "
        "loss, below 1 is better than the full cache.",
        "",
        "| policy | " + " | ".join(f"{b:g} of the context" for b in BUDGETS) + " |",
        "|---|" + "---|" * len(BUDGETS),
    ]
    for name in given["policy"]:
        cells = []
        for budget in BUDGETS:
            middle, low, high = ratio(np.asarray(found[f"{name} {budget}"]), full)
            cells.append(f"{middle:.3f} [{low:.3f}, {high:.3f}]")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    policies = " ".join(f"--policy {name}" for name in given["policy"])
    lines += ["", f"Command: `python benchmarks/perplexity.py -n {given['n']} {policies}`.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--policy", action="append", required=True, metavar="NAME[:OPTION=VALUE]")
    parser.add_argument("--haystack", default="prose")
    parser.add_argument("--context", type=int, default=768)
    parser.add_argument("--continuation", type=int, default=128)
    parser.add_argument("-n", type=int, default=100)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "perplexity")
    arguments = parser.parse_args()
    results = measure(arguments)
    arguments.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    arguments.output.with_suffix(".md").write_text(page(results), encoding="utf-8")
    print(page(results))


if __name__ == "__main__":
    main()
