"""What a policy costs per layer at a context of 4096, next to kvpress's press of the same method.

    python benchmarks/policy_cost.py --peer-python PATH

Scoring, selecting and compacting of one layer to half of the context, float32, one core, one
thread; both sides in turn, after a round that only warms up. Writes policy_cost.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from vs_kvpress import CONFIG, ROOT, Side, commit, machine, make_peer

POLICIES = (
    "streaming",
    "knorm",
    "tova",
    "keydiff",
    "snapkv",
    "restkv",
    "ada-snapkv",
    "chunkkv",
    "pyramidkv",
    "caote",
    "cake",
    "expected-attention",
    "lagkv",
    "criticalkv",
    "compactor",
    "value-merging",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", help="a Python with torch, transformers and kvpress")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    arguments = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    rng = random.Random(0)
    settings = {
        "config": {**CONFIG, "num_hidden_layers": 2},
        "tokens": [rng.randrange(CONFIG["vocab_size"]) for _ in range(arguments.context)],
        "fraction": 0.5,
        "policies": POLICIES,
    }
    peer = Side(arguments.peer_python or make_peer(), "policy_cost_peer.py", settings, core)
    own = Side(sys.executable, "policy_cost_own.py", settings, core)
    rounds: dict[str, list[dict[str, float]]] = {"kvpress": [], "kvjax": []}
    for index in range(arguments.rounds + 1):
        for name, side in (("kvpress", peer), ("kvjax", own)):
            measured = side.round()
            if index > 0:
                rounds[name].append(measured)
        print(f"round {index} of {arguments.rounds}", file=sys.stderr)
    peer.close()
    own.close()
    result = {
        "command": f"python benchmarks/policy_cost.py --rounds {arguments.rounds}",
        "commit": commit(),
        "machine": machine(),
        "context": arguments.context,
        "rounds": rounds,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "policy_cost.json").write_text(json.dumps(result, indent=1) + "\n")
    page = markdown(result)
    (arguments.out / "policy_cost.md").write_text(page)
    print(page)


def markdown(result: dict[str, Any]) -> str:
    peer, own = result["rounds"]["kvpress"], result["rounds"]["kvjax"]
    snapkv = median(own, "snapkv")
    lines = [
        "# What a policy costs",
        "",
        f"`{result['command']}` at commit `{result['commit']}`; {result['machine']}, one core, one "
        "thread, float32.",
        "",
        f"Milliseconds per layer for scoring, selecting and compacting {result['context']} entries "
        f"of 4 KV heads of 64 (8 query heads) to half: median (min) of {len(own)} rounds.",
        "",
        "| policy | kvpress | kvjax | kvpress / kvjax | kvjax / its SnapKV |",
        "|---|---|---|---|---|",
    ]
    for name in POLICIES:
        ours = median(own, name)
        theirs = f"{median(peer, name) / ours:.2f}x" if name in peer[0] else ""
        shown = cell(peer, name) if name in peer[0] else "not there"
        lines.append(f"| {name} | {shown} | {cell(own, name)} | {theirs} | {ours / snapkv:.2f} |")
    return "\n".join([*lines, ""])


def median(rounds: list[dict[str, float]], name: str) -> float:
    return statistics.median(measured[name] * 1e3 for measured in rounds)


def cell(rounds: list[dict[str, float]], name: str) -> str:
    values = [measured[name] * 1e3 for measured in rounds]
    return f"{statistics.median(values):.1f} ({min(values):.1f})"


if __name__ == "__main__":
    main()
