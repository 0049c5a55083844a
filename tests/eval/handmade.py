"""Results made by hand: any tasks, policies and scores, without a model."""

from __future__ import annotations

import dataclasses
import json
import random

from eval import config
from eval.journal import FORMAT
from eval.records import Record, Results, SampleResult

RULER = [
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
]


def record(policy: str, budget: str = "full", score: float = 1.0, **changes) -> Record:
    fields = {
        "budget_tokens": 64,
        "answer": f"answer {score:g}",
        "cache_bytes": 1000,
        "alive_bytes": 800,
        "kept_tokens": 64.0,
        "peak_bytes": 5000,
        "compress_seconds": 0.1,
        "question_seconds": 0.1,
        "decode_seconds": 0.5,
        "tokens_per_second": 20.0,
        "generated_tokens": 10,
        "rows": 1,
        "kept_profile": (0.5, 1.0, 0.0),
    }
    return Record(policy=policy, budget=budget, score=score, **fields | changes)


def sample(task: str, number: int, records, haystack="noise", length=4096, **changes):
    fields = {
        "depth": None,
        "prompt_tokens": 4000,
        "question_tokens": 20,
        "cut_tokens": 0,
        "max_new_tokens": 32,
        "question": "What is it?",
        "answers": ("it",),
        "excerpt": "This is it.",
        "needle_tokens": ((100, 110),),
        "metadata": {"needle": "it"},
        "prefill_seconds": 1.0,
        "model_seconds": 2.0,
        "wall_seconds": 2.5,
        "batch": 1,
    }
    return SampleResult(
        id=f"{task}/{haystack}/{length}/s{number}",
        task=task,
        haystack=haystack,
        length=length,
        seed=number,
        records=tuple(records),
        **fields | changes,
    )


def results(samples, policies=("snapkv", "h2o"), budgets=(0.25,), tasks=None, **changes):
    content = {
        "model": "tiny",
        "tasks": tasks or [{"name": "ruler", "lengths": [4096], "samples": 1}],
        "policies": list(policies),
        "budgets": list(budgets),
    }
    facts = {
        key: changes.pop(key) for key in ("question", "seed", "max_new_tokens") if key in changes
    }
    values = {
        "environment": {"commit": "abc", "jax": "0"},
        "prompt": {"protocol": "hidden", "template": {}, "end_tokens": [1], "tokenised": "apart"},
    }
    return Results(
        config=config.from_mapping({**content, **facts}), samples=tuple(samples), **values | changes
    )


def family(subsets=RULER, policies=9, budgets=(0.5, 0.25, 128), n=10, haystacks=("noise",), seed=0):
    """Scores that fall with the budget, some of them fractions."""
    rng = random.Random(seed)
    names = [f"policy{i}" for i in range(policies)]
    samples = []
    for subset in subsets:
        for kind in haystacks:
            for number in range(n):
                records = [record("full", kept_tokens=4000.0, cache_bytes=10**7)]
                for b, budget in enumerate(budgets):
                    records += [
                        record(
                            name,
                            str(budget),
                            rng.choice((0.0, 1.0, 1.0, 1 / 3)) if rng.random() < 0.9 - b / 4 else 0,
                            cache_bytes=5 * 10**6 // (b + 1) + 1000 * i,
                        )
                        for i, name in enumerate(names)
                    ]
                samples.append(sample(f"ruler/{subset}", number, records, haystack=kind))
    # Only registered policies have no say here: labels are free.
    return results(samples, policies=names, budgets=budgets)


def write_journal(path, run: Results, samples=None) -> None:
    """A journal as the harness leaves it."""
    header = {
        "format": FORMAT,
        "config_hash": run.config.hash,
        "config": run.config.mapping,
        "prompt": run.prompt,
        "environment": run.environment,
        "absent": run.absent,
    }
    chosen = run.samples if samples is None else samples
    lines = [header, *map(dataclasses.asdict, chosen)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
