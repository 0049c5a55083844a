"""What a config asks for, before any of it runs."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

import kvjax
from eval import config, estimate, planning
from eval.estimate import Speed
from eval.tasks import TASKS, documents
from eval.tasks.base import Task
from tests.eval.fakes import WordTokenizer, small_config
from tests.eval.tasks import written
from tests.eval.test_engine import CONFIG


def count(*texts: str) -> int:
    return sum(len(WordTokenizer().encode(text)) for text in texts)


def ruler(**changes):
    return small_config(tasks=[{"name": "ruler", "lengths": [700], "samples": 2, **changes}])


def test_a_prefix_of_the_run_covers_every_cell():
    plan = planning.plan(small_config(), count)
    cells = [(s.haystack, s.length, s.depth) for s in plan.samples]
    assert len(cells) == 24 and set(cells[:12]) == set(cells)
    assert [s.seed for s in plan.samples] == [0] * 12 + [1] * 12


def test_a_subset_brings_its_own_text_or_takes_the_configs():
    plan = planning.plan(ruler(subsets=["niah_single_1", "cwe"], haystacks=["sentences"]), count)
    assert {(s.task, s.haystack) for s in plan.samples} == {
        ("ruler/niah_single_1", "sentences"),
        ("ruler/cwe", "words"),
    }
    made = [s.make() for s in plan.samples]
    assert [s.id for s in made] == [s.id for s in plan.samples]
    assert len({s.id for s in made}) == len(made)


def test_the_same_sample_is_not_asked_for_twice():
    twice = [{"name": "ruler", "subset": "vt", "lengths": [700], "samples": n} for n in (1, 2)]
    with pytest.raises(ValueError, match="is asked for twice"):
        planning.plan(small_config(tasks=twice), count)


def test_a_metric_without_its_package_is_refused_before_the_run(monkeypatch):
    def score(sample, text):
        raise ImportError("No module named 'jieba'", name="jieba")

    task = Task(name="odd", summary="", score=score, make=TASKS["needle"].make, depths=True)
    monkeypatch.setitem(TASKS, "odd", task)
    content = small_config().mapping["tasks"][0] | {"name": "odd"}
    with pytest.raises(ValueError, match=r"needs the package jieba; install kvjax\[eval\]"):
        planning.plan(small_config(tasks=[content]), count)


@pytest.mark.parametrize("subset", [0, 1])
def test_the_metric_of_every_subset_and_kind_of_sample_is_tried(tmp_path, monkeypatch, subset):
    """The package that is missing is needed by one of two subsets, and by its second kind alone."""

    def score(sample, text):
        if sample.task == f"odd/{subset}" and sample.metadata["task"] == "second":
            raise ImportError("scores of code need rapidfuzz: pip install 'kvjax[eval]'")
        return 1.0

    def load(path, name):
        return [
            documents.sample(
                task="odd", subset=name, key=kind, context=kind, question="?", answers=("a",),
                max_new_tokens=1, metadata={"task": kind},
            )
            for kind in ("first", "second")
        ]  # fmt: skip

    task = Task(name="odd", summary="", score=score, load=load, subsets=("0", "1"))
    monkeypatch.setitem(TASKS, "odd", task)
    with pytest.raises(ValueError, match=r"^task odd: scores of code need rapidfuzz: pip install"):
        planning.plan(small_config(tasks=[{"name": "odd", "path": str(tmp_path)}]), count)


def test_a_metric_that_fails_on_one_sample_does_not_stop_the_run(tmp_path, monkeypatch):
    def score(sample, text):
        raise KeyError("functions")

    task = Task(name="odd", summary="", score=score, make=TASKS["needle"].make, depths=True)
    monkeypatch.setitem(TASKS, "odd", task)
    content = small_config().mapping["tasks"][0] | {"name": "odd"}
    assert len(planning.plan(small_config(tasks=[content]), count).samples) == 24


def aime(number):
    return {"id": number, "problem": f"Find {number}.", "answer": number}


@pytest.mark.parametrize("name", ["test.jsonl", "train.jsonl", "aime25.jsonl"])
def test_a_file_is_not_evaluated_as_several_subsets(tmp_path, name):
    file = written.jsonl(tmp_path / name, [aime(1)])
    for path in (file, tmp_path):
        task = {"name": "aime", "path": str(path)}
        if path == file or "aime" not in name:
            with pytest.raises(ValueError, match=rf"{name}, for 2024 and 2025: give one subset of"):
                planning.plan(small_config(tasks=[task]), count)
        plan = planning.plan(small_config(tasks=[{**task, "subset": "2025"}]), count)
        assert plan.counts == {"aime/2025": 1}


@pytest.mark.parametrize("name", ["longbench", "infinitebench", "scbench", "longmemeval"])
def test_one_file_is_one_subset_of_every_task(tmp_path, name):
    file = written.jsonl(tmp_path / "one.jsonl", [{"unread": 1}])
    with pytest.raises(ValueError, match=r"has one file, one\.jsonl, for .* give one subset of"):
        planning.plan(small_config(tasks=[{"name": name, "path": str(file)}]), count)


def test_a_file_of_its_own_for_every_year(tmp_path):
    for year in ("2024", "2025", "2026"):
        written.jsonl(tmp_path / f"aime_{year}.jsonl", [aime(1), aime(2)])
    plan = planning.plan(small_config(tasks=[{"name": "aime", "path": str(tmp_path)}]), count)
    assert plan.counts == {f"aime/{year}": 2 for year in ("2024", "2025", "2026")}


def test_contents_follow_what_is_asked_and_not_how_much_of_it(tmp_path):
    file = tmp_path / "test.jsonl"
    task = {"name": "aime", "subset": "2024", "path": str(file), "samples": 1}

    def contents(*rows, **changes):
        written.jsonl(file, list(rows))
        return planning.plan(small_config(tasks=[{**task, **changes}]), count).contents

    first = contents(aime(1), aime(2))
    assert contents(aime(1), aime(2), samples=2) == first
    assert contents(aime(1), aime(2) | {"answer": 3}) != first
    assert list(first) == ["samples of aime/2024"]
    assert list(planning.plan(small_config(), count).contents) == [
        "haystack noise",
        "haystack prose",
    ]


def test_time_left_follows_from_the_samples_done(tmp_path):
    from eval import harness
    from tests.eval.fakes import FakeEngine

    done = harness.run(small_config(), FakeEngine(), output=tmp_path).samples
    each = np.mean([s.wall_seconds / s.batch for s in done])
    assert estimate.measured(done, 7) == pytest.approx(7 * each)
    assert estimate.measured([], 7) is None


def test_predicted_time_counts_products_and_bytes():
    task = {"name": "needle", "haystack": "noise", "lengths": [200], "depths": [0.5], "samples": 1}
    settings = small_config(tasks=[task], budgets=[0.5], max_new_tokens=10)
    plan = planning.plan(settings, count)
    model = kvjax.Decoder.random(CONFIG, jax.random.key(0))
    weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model))
    # A machine that only reads: every decode step reads the weights and all caches.
    slow_reader = Speed(flops=1e30, bytes=1.0)
    entry = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 4
    reads = 10 * (2 * weights * 4 + (200 + 3 * 100) * entry)
    found = estimate.predicted(settings, plan, CONFIG, 3, slow_reader, 4)
    assert found == pytest.approx(reads)
    # One that only multiplies.
    slow_product = Speed(flops=1.0, bytes=1e30)
    prefill = (
        2 * weights * 200 + 2 * CONFIG.num_layers * CONFIG.num_heads * CONFIG.head_dim * 200**2
    )
    found = estimate.predicted(settings, plan, CONFIG, 3, slow_product, 4)
    assert found == pytest.approx(prefill * (1 + 0.05 * 3) + 10 * 2 * weights * (1 + 3))


def test_configs_that_ship_are_good():
    for name in ("demo", "needle_policies", "ruler"):
        assert config.load(f"configs/{name}.yaml").policies[0].label == "full"
