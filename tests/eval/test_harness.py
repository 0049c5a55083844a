"""One prefill per sample, nothing dropped, a killed run goes on where it was."""

from __future__ import annotations

import json

import pytest

from eval import harness
from eval.config import from_mapping
from eval.journal import read_journal
from eval.tasks import TASKS
from eval.tasks.base import Sample, Task, string_match
from tests.eval.fakes import FakeEngine, ignoring_times, small_config, untimed

ONE = {"name": "needle", "haystack": "noise", "lengths": [200], "depths": [0], "samples": 1}


def test_one_prefill_serves_every_policy_and_budget(tmp_path):
    engine, config = FakeEngine(), small_config()
    results = harness.run(config, engine, output=tmp_path)
    assert len(engine.prefills) == len(results.samples) == 24
    assert len(results.samples[0].records) == 1 + 2 * 2


def test_full_cache_runs_first_and_alone_then_each_budget_in_one_batch(tmp_path):
    engine = FakeEngine()
    results = harness.run(small_config(), engine, output=tmp_path)
    assert engine.batches[:3] == [1, 2, 2]
    labels = [(r.policy, r.budget) for r in results.samples[0].records]
    assert labels == [
        ("full", "full"),
        ("first", "0.5"),
        ("last", "0.5"),
        ("first", "0.25"),
        ("last", "0.25"),
    ]


def test_a_policy_that_needs_more_slots_does_not_lend_its_bytes_to_others(tmp_path):
    engine = FakeEngine(wide=("first",))
    results = harness.run(small_config(), engine, output=tmp_path)
    assert engine.batches[:5] == [1, 1, 1, 1, 1]
    first, last = results.samples[0].records[1:3]
    assert first.cache_bytes > last.cache_bytes and first.peak_bytes > last.peak_bytes


def test_shapes_do_not_depend_on_the_sample(tmp_path):
    engine = FakeEngine()
    harness.run(small_config(), engine, output=tmp_path)
    buckets = {shape[0] for shape in engine.shapes}
    assert len(engine.shapes) == 3 * len(buckets)  # full and two budgets


def test_scores_follow_from_what_was_kept(tmp_path):
    results = harness.run(small_config(), FakeEngine(), output=tmp_path)
    for sample in results.samples:
        for record in sample.records:
            kept = record.needle_kept == 1
            if kept or record.needle_kept == 0:
                assert record.score == kept, (sample.id, record)
            if sample.depth in (0, 1) and record.budget == "0.5":
                assert kept == (record.policy == ("last" if sample.depth else "first"))


def test_costs_are_measured(tmp_path):
    results = harness.run(small_config(), FakeEngine(), output=tmp_path)
    sample = results.samples[0]
    full, half = sample.records[0], sample.records[1]
    assert full.peak_bytes == full.cache_bytes > half.cache_bytes > half.alive_bytes > 0
    assert half.peak_bytes > half.cache_bytes and half.tokens_per_second == 8 / 0.4
    assert half.kept_tokens == half.budget_tokens == round(sample.prompt_tokens / 2)
    assert sample.prefill_seconds == 0.5


def test_failures_are_listed_and_count_as_wrong(tmp_path):
    engine = FakeEngine(labels=("full", "first", "broken"), fail_prefill={3})
    config = small_config(policies=["first", "broken"])
    results = harness.run(config, engine, output=tmp_path)
    assert len(results.samples) == 24
    failed = {(s.id, r.policy, r.budget) for s, r in results.failures}
    third = results.samples[2]
    assert {(third.id, r.policy, r.budget) for r in third.records} <= failed
    assert len(failed) == 2 * 24 + 3
    assert all(r.score == 0 for _, r in results.failures)
    assert "out of <memory>" in third.records[0].error
    others = [r for s in results.samples for r in s.records if r.error is None]
    assert any(r.score for r in others)


@pytest.mark.parametrize("stop_after", [1, 10, 23])
def test_a_killed_run_resumes_with_identical_results(tmp_path, stop_after):
    config = small_config()
    whole = harness.run(config, FakeEngine(), output=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        harness.run(config, FakeEngine(stop_after=stop_after), output=tmp_path / "cut")
    lines = []
    engine = FakeEngine()
    resumed = harness.run(config, engine, lines.append, output=tmp_path / "cut")
    assert len(engine.prefills) == 24 - stop_after
    assert ignoring_times(resumed) == ignoring_times(whole)
    assert untimed(resumed) == untimed(whole)
    assert lines[0] == f"resumed: {stop_after} of 24 samples were done"


def test_a_line_cut_short_is_run_again(tmp_path):
    config = small_config()
    whole = harness.run(config, FakeEngine(), output=tmp_path)
    journal = tmp_path / "samples.jsonl"
    journal.write_bytes(journal.read_bytes()[:-40])
    engine = FakeEngine()
    assert untimed(harness.run(config, engine, output=tmp_path)) == untimed(whole)
    assert len(engine.prefills) == 1


def test_more_samples_go_on_from_fewer(tmp_path):
    few, more = (small_config(tasks=[{**ONE, "samples": n}]) for n in (1, 3))
    harness.run(few, FakeEngine(), output=tmp_path)
    engine = FakeEngine()
    assert len(harness.run(more, engine, output=tmp_path).samples) == 3
    assert len(engine.prefills) == 2


def test_results_of_another_config_are_not_mixed_in(tmp_path):
    harness.run(small_config(), FakeEngine(), output=tmp_path)
    before = (tmp_path / "samples.jsonl").read_bytes()
    other = small_config(seed=5)
    with pytest.raises(ValueError, match=r"another config.*--overwrite"):
        harness.run(other, FakeEngine(), output=tmp_path)
    assert (tmp_path / "samples.jsonl").read_bytes() == before
    engine = FakeEngine()
    harness.run(other, engine, output=tmp_path, overwrite=True)
    assert len(engine.prefills) == 24


def test_a_damaged_journal_is_refused_with_its_line(tmp_path):
    harness.run(small_config(), FakeEngine(), output=tmp_path)
    journal = tmp_path / "samples.jsonl"
    lines = journal.read_text().split("\n")
    lines[3] = lines[3][:50]
    journal.write_text("\n".join(lines))
    with pytest.raises(ValueError, match="line 4 is damaged"):
        harness.run(small_config(), FakeEngine(), output=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 4000}, "length=320 with max_new_tokens=4000: allowed .* 4096"),
        (
            {"tasks": [{**ONE, "lengths": [9]}]},
            "length=9: too short",
        ),
        (
            {"tasks": [{**ONE, "haystack": "file:/no/such"}]},
            "/no/such.*No such file",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        harness.run(small_config(**change), FakeEngine(), output=tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budgets": ["bytes: 1000"]}, r"budgets\[0\]='bytes: 1000': below one entry"),
        ({"max_new_tokens": 4096}, "with max_new_tokens=4096: allowed by the model are 4096"),
    ],
)
def test_tasks_of_files_are_checked_like_others(tmp_path, monkeypatch, change, message):
    class Small(FakeEngine):
        def resolve(self, budget, length):
            if str(budget).startswith("bytes"):
                raise ValueError("below one entry")
            return super().resolve(budget, length)

    tasks = shared_task(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=message):
        harness.run(small_config(tasks=tasks, **change), Small(), output=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_progress_tells_the_time_left(tmp_path):
    lines = []
    harness.run(small_config(), FakeEngine(), lines.append, output=tmp_path)
    assert len(lines) == 25 and lines[-1] == ""
    assert lines[0].startswith("[1/24] needle noise 200 depth 0 | full 1.00")
    assert all(line.endswith(" left") for line in lines[:-1])


def test_the_prompt_is_recorded(tmp_path):
    results = harness.run(small_config(), FakeEngine(), output=tmp_path)
    assert results.prompt["end_tokens"] == [0, 1]
    assert results.prompt["template"]["after_user"] == "<|im_end|>\n<|im_start|>assistant\n"
    header = json.loads((tmp_path / "samples.jsonl").read_text().split("\n")[0])
    assert header["config_hash"] == small_config().hash
    assert header["prompt"] == results.prompt


def shared_task(tmp_path, monkeypatch):
    """Two contexts with two and three questions, read from "files"."""

    def load(path, subset):
        del path, subset
        asked = {"a": ["one", "two"], "b": ["three", "four", "five"]}
        return [
            Sample(
                id=f"shared/{name}/{question}",
                task="shared",
                haystack="documents",
                seed=0,
                depth=None,
                length=None,
                context=f"One of the special magic numbers for {name} is: 77. " + "Words. " * 40,
                question=question,
                answer_prefix="",
                answers=("77",),
                max_new_tokens=9,
            )
            for name, questions in asked.items()
            for question in questions
        ]

    task = Task(name="shared", summary="", score=string_match, load=load)
    monkeypatch.setitem(TASKS, "shared", task)
    return [{"name": "shared", "path": str(tmp_path)}]


def test_questions_of_one_context_share_its_prefill(tmp_path, monkeypatch):
    config = small_config(tasks=shared_task(tmp_path, monkeypatch))
    engine = FakeEngine()
    results = harness.run(config, engine, output=tmp_path)
    assert len(results.samples) == 5 and len(engine.prefills) == 2
    assert [s.batch for s in results.samples] == [2, 2, 3, 3, 3]
    assert all(r.score == (r.policy != "last") for s in results.samples for r in s.records)


def test_a_question_that_is_seen_shares_nothing(tmp_path, monkeypatch):
    config = small_config(tasks=shared_task(tmp_path, monkeypatch), question="seen")
    engine = FakeEngine()
    harness.run(config, engine, output=tmp_path)
    assert len(engine.prefills) == 5


def test_a_run_killed_within_a_context_asks_only_what_is_missing(tmp_path, monkeypatch):
    config = small_config(tasks=shared_task(tmp_path, monkeypatch))
    whole = harness.run(config, FakeEngine(), output=tmp_path)
    journal = tmp_path / "samples.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(True)[:-1]))
    engine = FakeEngine()
    assert ignoring_times(harness.run(config, engine, output=tmp_path)) == ignoring_times(whole)
    assert len(engine.prefills) == 1


def test_batches_hold_contexts_of_one_bucket_and_change_no_answer(tmp_path):
    alone = harness.run(small_config(), FakeEngine(), output=tmp_path / "alone")
    engine = FakeEngine()
    together = harness.run(small_config(), engine, output=tmp_path / "batch", batch=4)
    assert ignoring_times(together) == ignoring_times(alone)
    assert max(engine.prefill_batches) == 4 and sum(engine.prefill_batches) == 24


def test_a_batch_that_is_too_large_runs_one_by_one(tmp_path):
    engine = FakeEngine(most=1)
    results = harness.run(small_config(), engine, output=tmp_path, batch=4)
    assert results.failures == []
    alone = harness.run(small_config(), FakeEngine(), output=tmp_path / "alone")
    assert ignoring_times(results) == ignoring_times(alone)


def test_processes_split_the_contexts_and_their_files_are_read_together(tmp_path):
    whole = harness.run(small_config(), FakeEngine(), output=tmp_path / "whole")
    parts = [
        harness.run(small_config(), FakeEngine(), output=tmp_path / "split", shard=(i, 3))
        for i in range(3)
    ]
    assert sorted(s.id for part in parts for s in part.samples) == sorted(
        s.id for s in whole.samples
    )
    engine = FakeEngine()
    merged = harness.run(small_config(), engine, output=tmp_path / "split")
    assert engine.prefills == [] and ignoring_times(merged) == ignoring_times(whole)


def test_a_sample_that_cannot_be_made_is_listed_as_wrong(tmp_path, monkeypatch):
    def make(request):
        if request.seed == 1:
            raise ValueError("no such sample")
        return TASKS["needle"].make(request)

    task = Task(name="odd", summary="", score=string_match, make=make, depths=True)
    monkeypatch.setitem(TASKS, "odd", task)
    config = small_config(tasks=[{**ONE, "name": "odd", "samples": 3}])
    results = harness.run(config, FakeEngine(), output=tmp_path)
    assert len(results.samples) == 3
    assert [bool(r.error) for s in results.samples for r in s.records] == [False] * 5 + [
        True
    ] * 5 + [False] * 5
    assert "no such sample" in results.samples[1].records[0].error


def test_a_task_without_its_file_is_reported_as_absent(tmp_path):
    ruler = {"name": "ruler", "subsets": ["niah_single_1", "qa_1"], "lengths": [400], "samples": 1}
    results = harness.run(small_config(tasks=[ruler]), FakeEngine(), output=tmp_path)
    assert [s.task for s in results.samples] == ["ruler/niah_single_1"]
    assert [task for task, _ in results.absent] == ["ruler/qa_1"]
    header = json.loads((tmp_path / "samples.jsonl").read_text().split("\n")[0])
    assert header["absent"] == [list(one) for one in results.absent]


def test_long_contexts_are_cut_in_the_middle_and_say_so(tmp_path, monkeypatch):
    (task,) = shared_task(tmp_path, monkeypatch)
    config = small_config(tasks=[{**task, "max_length": 60}])
    results = harness.run(config, FakeEngine(), output=tmp_path)
    for sample in results.samples:
        assert sample.prompt_tokens + sample.question_tokens == 60 and sample.cut_tokens > 0


def test_the_journal_says_what_ran(tmp_path):
    config = small_config()
    harness.run(config, FakeEngine(), output=tmp_path)
    header, samples = read_journal(tmp_path / "samples.jsonl")
    assert from_mapping(header["config"]) == config and len(samples) == 24
