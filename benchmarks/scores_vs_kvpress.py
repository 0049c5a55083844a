"""The same samples, weights and kept fractions through kvjax and kvpress: do the scores agree?

    python benchmarks/scores_vs_kvpress.py --peer-python PATH

Needle retrieval in prose with the question hidden. Token ids, numbers of kept entries and the
scoring are shared; prefill, eviction and greedy decoding are each side's own. kvpress gets the
default model as a Hugging Face directory that `kvjax convert` writes. Without --peer-python, an
environment with kvpress is made in .venv-peer. Writes scores_vs_kvpress.json and .md to --out.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from vs_kvpress import ROOT, commit, machine, make_peer

import kvjax
from eval import engine, harness
from eval.config import Config, from_mapping
from eval.planning import plan
from eval.progress import Printer
from eval.prompt import Prompter
from eval.records import Results
from eval.statistics import paired_difference
from eval.tasks import TASKS

MODEL = "smollm2-135m-instruct"
# Ours with the options at which kvpress's presses stand.
POLICIES = ["streaming", "knorm", "keydiff", {"snapkv": {"window": 64}}, "expected-attention"]
BUDGETS = [0.5, 0.25]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", help="a Python with torch, transformers and kvpress")
    parser.add_argument("--samples", type=int, default=8, help="of every depth")
    parser.add_argument("--length", type=int, default=900)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "scores_vs_kvpress")
    arguments = parser.parse_args()
    config = from_mapping(
        {
            "model": MODEL,
            "tasks": [
                {
                    "name": "needle",
                    "haystack": "prose",
                    "lengths": [arguments.length],
                    "depths": [0, 0.25, 0.5, 0.75, 1],
                    "samples": arguments.samples,
                }
            ],
            "policies": POLICIES,
            "budgets": BUDGETS,
            "max_new_tokens": 16,
        }
    )
    loaded = kvjax.load(MODEL)
    own = harness.run(config, engine.build(config, loaded), Printer(), arguments.run)
    peer = peer_answers(config, own, loaded.tokenizer, arguments.peer_python or make_peer())
    result = {
        "command": shlex.join(
            [
                *("python", "benchmarks/scores_vs_kvpress.py"),
                *(["--peer-python", "PATH"] if arguments.peer_python else []),
                *("--samples", str(arguments.samples), "--length", str(arguments.length)),
            ]
        ),
        "commit": commit(),
        "machine": machine(),
        "versions": {**own.environment, **peer.pop("versions")},
        "length": arguments.length,
        "rows": rows(own, peer["answers"]),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "scores_vs_kvpress.json").write_text(json.dumps(result, indent=1) + "\n")
    page = markdown(result)
    (arguments.out / "scores_vs_kvpress.md").write_text(page)
    print(page)


def peer_answers(config: Config, own: Results, tokenizer: Any, python: str) -> dict[str, Any]:
    """kvpress's answers as token ids, by sample, policy and budget."""
    prompter = Prompter(tokenizer, config.question)
    samples = {planned.id: planned.make() for planned in plan(config, prompter.count).samples}
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "model"
        convert = ["-m", "kvjax.cli.main", "convert", MODEL, str(checkpoint), "--format", "hf"]
        subprocess.run([sys.executable, *convert], check=True, cwd=ROOT)
        asked = []
        for result in own.samples:
            prompt = prompter.prompt(samples[result.id])
            kept = [(r.policy, r.budget, r.budget_tokens) for r in result.records]
            asked.append(
                {
                    "id": result.id,
                    "context": prompt.prefill,
                    "question": prompt.question,
                    "kept": kept,
                }
            )
        settings = {
            "checkpoint": str(checkpoint),
            "samples": asked,
            "max_new_tokens": config.max_new_tokens,
            "end_tokens": sorted(tokenizer.end_tokens),
        }
        job = Path(directory) / "job.json"
        job.write_text(json.dumps(settings))
        script = ROOT / "benchmarks" / "scores_vs_kvpress_peer.py"
        done = subprocess.run(
            [python, str(script), str(job)], check=True, stdout=subprocess.PIPE, text=True
        )
    answers = json.loads(done.stdout.splitlines()[-1])
    return {
        "versions": answers["versions"],
        "answers": {
            (sample, policy, budget): tokenizer.decode(ids)
            for sample, policy, budget, ids in answers["answers"]
        },
    }


def rows(own: Results, peer: dict[tuple[str, str, str], str]) -> list[dict[str, Any]]:
    """Both sides' mean score, the paired difference, and how often the answers are the same."""
    found = []
    columns = dict.fromkeys((r.policy, r.budget) for s in own.samples for r in s.records)
    score = TASKS["needle"].score
    for policy, budget in columns:
        ours, theirs, same = [], [], []
        for sample in own.samples:
            (record,) = (r for r in sample.records if (r.policy, r.budget) == (policy, budget))
            text = peer[sample.id, policy, budget]
            ours.append(record.score)
            theirs.append(score(sample, text))
            same.append(record.answer == text)
        difference = paired_difference(ours, theirs)
        found.append(
            {
                "policy": policy,
                "budget": budget,
                "n": len(ours),
                "kvjax": fmean(ours),
                "kvpress": fmean(theirs),
                "difference": difference.mean,
                "low": difference.low,
                "high": difference.high,
                "agree": not difference.significant,
                "same_answers": fmean(same),
            }
        )
    return found


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "# The same samples through kvjax and kvpress",
        "",
        f"`{result['command']}` at commit `{result['commit']}`; {result['machine']}, float32.",
        "",
        f"{MODEL}, one needle in prose, {result['length']} tokens, question hidden from the "
        "compressor. Both sides read the same token ids, keep the same number of entries per head "
        "and decode greedily. Difference: mean of kvjax - kvpress, 95 % paired bootstrap.",
        "",
        "| policy | kept | kvjax | kvpress | difference | interval | agree | same answers | n |",
        "|---|---|--:|--:|--:|--:|---|--:|--:|",
    ]
    for row in result["rows"]:
        kept = "all" if row["budget"] == "full" else f"{100 * float(row['budget']):g} %"
        lines.append(
            f"| {row['policy']} | {kept} | {row['kvjax']:.2f} | {row['kvpress']:.2f} | "
            f"{row['difference']:+.2f} | {row['low']:+.2f} – {row['high']:+.2f} | "
            f"{'yes' if row['agree'] else 'NO'} | {100 * row['same_answers']:.0f} % | {row['n']} |"
        )
    versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items() if v)
    return "\n".join([*lines, "", f"Versions: {versions}.", ""])


if __name__ == "__main__":
    main()
