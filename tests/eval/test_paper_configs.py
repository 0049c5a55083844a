"""The configs of the papers' tables run as they stand, shrunk to a tiny model and short data."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import pytest

import kvjax
from eval import config, engine, harness
from kvjax.cli.main import main
from tests.eval.fakes import WordTokenizer
from tests.eval.test_engine import CONFIG

PAPERS = sorted(Path("configs/paper").glob("*.yaml"))
# Two tasks stand for their families; one sample, one short length, one small budget.
SUBSETS = ("niah_multiquery", "cwe")


@pytest.fixture(scope="module")
def model():
    tiny = dataclasses.replace(CONFIG, num_heads=2, vocab_size=4096, max_length=4096)
    return kvjax.Decoder.random(tiny, jax.random.key(1))


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_dry_run_shows_what_would_run(path, capsys):
    assert main(["eval", "--config", str(path), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "policies   full, " in shown and "budgets    " in shown
    # Data that is not here is said to be absent, task by task.
    assert "samples" in shown or "absent     " in shown


def shrunk(path: Path) -> config.Config:
    given = config.load_all(path)[0]
    tasks = [
        dataclasses.replace(
            task,
            samples=1,
            lengths=(700,),
            depths=task.depths[:1],
            path=None,
            subsets=SUBSETS if task.name == "ruler" else (),
        )
        for task in given.tasks
        if task.lengths
    ]
    budgets = tuple(32 if isinstance(b, int) else b for b in given.budgets)[:1]
    policies = tuple(_shrunk_policy(policy) for policy in given.policies)
    return dataclasses.replace(
        given, tasks=tuple(tasks), budgets=budgets, policies=policies, max_new_tokens=4
    )


def _shrunk_policy(policy: config.PolicyConfig) -> config.PolicyConfig:
    smaller = {"decode_interval": 8, "chunk": 64}
    options = tuple((name, smaller.get(name, value)) for name, value in policy.options)
    return dataclasses.replace(policy, options=options)


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_a_shrunken_run_answers_with_every_policy(path, model, tmp_path):
    small = shrunk(path)
    if not small.tasks:
        small = dataclasses.replace(small, tasks=(needle(),))
    results = harness.run(small, engine.build(small, (model, WordTokenizer())), output=tmp_path)
    assert [record.error for _, record in results.failures] == []
    assert len(results.samples) >= 1
    labels = {policy.label for policy in small.policies}
    assert all({r.policy for r in s.records} == labels for s in results.samples)


def needle() -> config.TaskConfig:
    """In place of a data set that is not here."""
    return config.TaskConfig(
        name="needle", haystacks=("noise",), lengths=(200,), depths=(0.5,), samples=1
    )
