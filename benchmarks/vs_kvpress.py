"""Prefill, decode and SnapKV against kvpress: one model, one core, measured in turn.

    python benchmarks/vs_kvpress.py --peer-python PATH

Both sides hold the same random Llama in float32 and are pinned to the same core with one thread.
After a round that only warms up, rounds alternate A B A B, so that a change of the machine's
speed meets both. Without --peer-python, an environment with kvpress is made in .venv-peer.
Writes vs_kvpress.json and vs_kvpress.md to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEER_PACKAGES = ("torch==2.13.0", "transformers==5.2.0", "kvpress==0.5.5")
CONFIG = {
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
SETTINGS = {"config": CONFIG, "fraction": 0.5, "window": 64, "kernel": 5}
ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
}
MAX_LOGIT_DIFFERENCE = 1e-3
# name, key, seconds -> shown, unit, and what is asked
ROWS = (
    ("prefill, no policy", "prefill", 1, "s", "1.25x"),
    ("decode, no policy", "decode", 1e3, "ms per token", "1.5x, 1.6x of the limit"),
    ("prefill, SnapKV at half", "snapkv_prefill", 1, "s", "1.25x"),
    ("decode, SnapKV at half", "snapkv_decode", 1e3, "ms per token", "1.5x, 1.6x of the limit"),
    ("SnapKV itself", "snapkv_per_layer", 1e3, "ms per layer", "15 ms at most"),
    ("prefill with SnapKV minus without", "snapkv_difference", 1e3, "ms per layer", ""),
)


class Side:
    """A process that measures one round whenever it is asked to."""

    def __init__(self, python: str, script: str, settings: dict[str, Any], core: int | None):
        def pin() -> None:
            if core is not None:
                os.sched_setaffinity(0, {core})

        environment = {**os.environ, **ONE_THREAD}
        if python == sys.executable:
            environment["PYTHONPATH"] = str(ROOT)
        self.name = script
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(
            [python, str(ROOT / "benchmarks" / script), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            preexec_fn=pin,
        )
        self.facts = self._answer()

    def round(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise SystemExit(f"{self.name} ended early:\n{self._errors.read()[-4000:]}")
        return json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", help="a Python with torch, transformers and kvpress")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    arguments = parser.parse_args()
    peer_python = arguments.peer_python or make_peer()
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else None
    rng = random.Random(0)
    tokens = [rng.randrange(CONFIG["vocab_size"]) for _ in range(arguments.context)]
    with tempfile.TemporaryDirectory() as checkpoint:
        settings = {
            **SETTINGS,
            "tokens": tokens,
            "new_tokens": arguments.new_tokens,
            "checkpoint": checkpoint,
        }
        # The peer makes the weights, so it starts first.
        peer = Side(peer_python, "vs_kvpress_peer.py", settings, core)
        own = Side(sys.executable, "vs_kvpress_own.py", settings, core)
        rounds: dict[str, list[dict[str, float]]] = {"kvpress": [], "kvjax": []}
        for index in range(arguments.rounds + 1):
            for name, side in (("kvpress", peer), ("kvjax", own)):
                measured = side.round()
                layers = CONFIG["num_hidden_layers"]
                more = measured["snapkv_prefill"] - measured["prefill"]
                measured["snapkv_difference"] = more / layers
                if index > 0:
                    rounds[name].append(measured)
            print(f"round {index} of {arguments.rounds}", file=sys.stderr)
        peer.close()
        own.close()
    result = summary(rounds, peer.facts, own.facts, arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "vs_kvpress.json").write_text(json.dumps(result, indent=1) + "\n")
    page = markdown(result)
    (arguments.out / "vs_kvpress.md").write_text(page)
    print(page)


def summary(
    rounds: dict[str, list[dict[str, float]]],
    peer: dict[str, Any],
    own: dict[str, Any],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    difference = max(abs(a - b) for a, b in zip(peer["logits"], own["logits"], strict=True))
    if not difference <= MAX_LOGIT_DIFFERENCE:
        raise SystemExit(f"the two sides are not the same model: logits differ by {difference:.2g}")
    first, bandwidth = rounds["kvjax"][0], median(rounds["kvjax"], "bandwidth")
    limit = {
        "decode": (own["weight_bytes"] + first["cache_bytes"]) / bandwidth,
        "snapkv_decode": (own["weight_bytes"] + first["snapkv_cache_bytes"]) / bandwidth,
    }
    return {
        "command": shlex.join(["python", "benchmarks/vs_kvpress.py", *shown(arguments)]),
        "commit": commit(),
        "versions": {
            "python": platform.python_version(),
            **own["versions"],
            **peer["versions"],
        },
        "machine": machine(),
        "context": arguments.context,
        "logit_difference": difference,
        "weight_bytes_per_token": own["weight_bytes"],
        "bandwidth": bandwidth,
        "limit": limit,
        "rounds": rounds,
    }


def markdown(result: dict[str, Any]) -> str:
    peer, own = result["rounds"]["kvpress"], result["rounds"]["kvjax"]
    lines = [
        "# kvjax against kvpress",
        "",
        f"`{result['command']}` at commit `{result['commit']}`; {result['machine']}, one core, "
        "one thread, float32.",
        "",
        f"Random Llama ({CONFIG['num_hidden_layers']} layers, width {CONFIG['hidden_size']}, "
        f"{CONFIG['num_attention_heads']} query and {CONFIG['num_key_value_heads']} KV heads of "
        f"{CONFIG['head_dim']}), context {result['context']}, the same weights on both sides "
        f"(logits differ by at most {result['logit_difference']:.1e}). Median (min) of {len(own)} "
        "rounds that alternate between the sides.",
        "",
        "| | kvpress | kvjax | ratio of medians | asked | machine's limit | kvjax / limit |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, key, scale, unit, asked in ROWS:
        theirs, ours = median(peer, key), median(own, key)
        limit = result["limit"].get(key)
        lines.append(
            f"| {name} ({unit}) | {cell(peer, key, scale)} | {cell(own, key, scale)} | "
            f"{f'{theirs / ours:.2f}x' if min(theirs, ours) > 0 else ''} | {asked} | "
            f"{'' if limit is None else f'{limit * scale:.1f}'} | "
            f"{'' if limit is None else f'{ours / limit:.2f}x'} |"
        )
    own_versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items())
    lines += [
        "",
        f"Limit: {result['weight_bytes_per_token'] / 1e6:.0f} MB of weights and the cache's bytes, "
        f"each read once per token, at {result['bandwidth'] / 1e9:.1f} GB/s (measured in the same "
        "rounds by reading 512 MiB).",
        "",
        f"Versions: {own_versions}.",
        "",
    ]
    return "\n".join(lines)


def cell(rounds: list[dict[str, float]], key: str, scale: float) -> str:
    values = [measured[key] * scale for measured in rounds]
    return f"{statistics.median(values):.3g} ({min(values):.3g})"


def median(rounds: list[dict[str, float]], key: str) -> float:
    return statistics.median(measured[key] for measured in rounds)


def shown(arguments: argparse.Namespace) -> list[str]:
    peer = ["--peer-python", "PATH"] if arguments.peer_python else []
    return [
        *peer,
        *("--rounds", str(arguments.rounds)),
        *("--context", str(arguments.context)),
        *("--new-tokens", str(arguments.new_tokens)),
    ]


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()

    parts = ("kvjax", "kernels_pallas", "train", "eval", "benchmarks")
    changed = git("status", "--porcelain", "--", *parts)
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")


def machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def make_peer() -> str:
    """The Python of .venv-peer, made with kvpress in it where it is not there yet."""
    folder = ROOT / ".venv-peer"
    python, done = folder / "bin" / "python", folder / "ready"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        (folder / ".gitignore").write_text("*\n")
        subprocess.run([str(python), "-m", "pip", "install", "-qq", *PEER_PACKAGES], check=True)
        done.touch()
    return str(python)


if __name__ == "__main__":
    main()
