"""A run goes on with its own results only, and says what they were made of and on."""

from __future__ import annotations

import dataclasses
import json

import pytest

from eval import durable, harness, merge, parts
from eval.journal import read_journal
from eval.tasks import TASKS
from tests.eval.fakes import FakeEngine, ignoring_times, small_config
from tests.eval.test_harness import ONE, shared_task


def change_header(path, **changes):
    """A change to None drops the entry."""
    first, rest = path.read_text().split("\n", 1)
    header = {k: v for k, v in {**json.loads(first), **changes}.items() if v is not None}
    path.write_text(json.dumps(header) + "\n" + rest)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "other"}, r"model \(float32\)"),
        ({"gates": "trained again"}, "policy first"),
        ({"model": "other", "gates": "other"}, r"model \(float32\), policy first"),
    ],
)
@pytest.mark.parametrize("shard", [(0, 1), (1, 2)])
def test_other_contents_under_the_same_names_are_refused(tmp_path, change, named, shard):
    """Whoever wrote the results: this process, or one that shares the run."""
    config = small_config()
    harness.run(config, FakeEngine(), output=tmp_path, shard=shard)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    engine = FakeEngine(**change)
    with pytest.raises(ValueError, match=rf"another {named} than is there now; give --overwrite"):
        harness.run(config, engine, output=tmp_path)
    assert engine.prefills == []
    assert {path: path.read_bytes() for path in before} == before
    harness.run(config, engine, output=tmp_path, overwrite=True)


def haystack_of(path):
    return [{**ONE, "haystack": f"file:{path}", "samples": 2}]


@pytest.mark.parametrize("identity", ["there", None])
def test_a_haystack_that_was_edited_is_refused(tmp_path, identity):
    """By the samples themselves where the journal is of before there were identities."""
    book = tmp_path / "book.txt"
    book.write_text("The fox ran over the hill. It was late. " * 30)
    config, run = small_config(tasks=haystack_of(book)), tmp_path / "run"
    harness.run(config, FakeEngine(), output=run)
    if identity is None:
        change_header(run / "samples.jsonl", identity=None)
    engine = FakeEngine()
    harness.run(config, engine, output=run)
    assert engine.prefills == []
    book.write_text("The dog ran over the hill. It was late. " * 30)
    with pytest.raises(ValueError, match=r"another haystack file:book\.txt"):
        harness.run(config, FakeEngine(), output=run)


def test_another_prompt_template_is_refused(tmp_path):
    config = small_config(tasks=[ONE])
    harness.run(config, FakeEngine(), output=tmp_path)
    other = FakeEngine()
    other.tokenizer.end_tokens = frozenset({1})
    with pytest.raises(ValueError, match="another prompt template"):
        harness.run(config, other, output=tmp_path)


def test_another_format_is_called_so(tmp_path):
    config = small_config(tasks=[ONE])
    harness.run(config, FakeEngine(), output=tmp_path)
    change_header(tmp_path / "samples.jsonl", format=1)
    with pytest.raises(ValueError, match="has format 1, this version writes 2; give --overwrite"):
        harness.run(config, FakeEngine(), output=tmp_path)


def test_a_journal_without_an_identity_goes_on(tmp_path):
    config = small_config(tasks=[{**ONE, "samples": 3}])
    whole = harness.run(config, FakeEngine(), output=tmp_path / "whole")
    path = tmp_path / "whole" / "samples.jsonl"
    environment = {"commit": "old", "device": "cpu"}
    change_header(path, identity=None, planned=None, environments=None, environment=environment)
    lines = [json.loads(line) for line in path.read_text().splitlines()[:3]]
    for line in lines[1:]:
        del line["environment"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine = FakeEngine()
    again = harness.run(config, engine, output=tmp_path / "whole")
    assert len(engine.prefills) == 1 and ignoring_times(again) == ignoring_times(whole)
    assert [s.environment for s in again.samples] == [0, 0, 1]
    assert again.environments[0] == environment
    assert again.identity == whole.identity


def test_every_sample_keeps_what_it_ran_on(tmp_path):
    config = small_config()
    with pytest.raises(KeyboardInterrupt):
        harness.run(config, FakeEngine(stop_after=5), output=tmp_path)
    harness.run(config, FakeEngine(device="tpu"), output=tmp_path)
    again = harness.run(config, FakeEngine(), output=tmp_path)  # asks nothing
    assert [s.environment for s in again.samples] == [0] * 5 + [1] * 19
    assert [one["device"] for one in again.environments] == ["cpu", "tpu"]
    assert again.environment["device"] == "cpu / tpu"
    (read,) = merge.merge([merge.read(tmp_path)])
    assert read == again
    (part,) = parts.parts(read)
    assert any("resumptions differ in device" in line for line in parts.warnings(part))


def test_shards_that_went_on_elsewhere_keep_what_they_ran_on(tmp_path):
    config = small_config()
    for index, device in enumerate(("cpu", "tpu")):
        engine = FakeEngine(device=device)
        harness.run(config, engine, output=tmp_path, shard=(index, 2))
    harness.run(config, FakeEngine(device="tpu"), output=tmp_path, shard=(0, 2))
    (read,) = merge.merge([merge.read(tmp_path)])
    ran_on = [read.environments[s.environment]["device"] for s in read.samples]
    assert ran_on.count("cpu") == ran_on.count("tpu") == 12
    assert read.environment["differs between shards"] == "device"


def test_a_run_on_one_machine_says_nothing_of_others(tmp_path):
    config = small_config()
    harness.run(config, FakeEngine(), output=tmp_path)
    (read,) = merge.merge([merge.read(tmp_path)])
    assert len(read.environments) == 1 and not any("differs" in name for name in read.environment)


@pytest.mark.parametrize("shard", [(0, 1), (0, 2)])
def test_samples_that_failed_are_asked_again(tmp_path, shard):
    config = small_config()
    first = harness.run(config, FakeEngine(fail_prefill={3, 7}), output=tmp_path, shard=shard)
    failed = [s.id for s in first.samples if s.failed]
    assert len(failed) == 2
    if shard != (0, 1):  # whose journal will repeat the failures of the first
        harness.run(config, FakeEngine(), output=tmp_path, shard=(1, 2))
    engine, lines = FakeEngine(), []
    again = harness.run(config, engine, lines.append, output=tmp_path, shard=shard)
    assert len(engine.prefills) == 2 and again.failures == []
    total = len(first.samples)
    assert lines[0] == (
        f"resumed: {total - 2} of {total} samples were done; 2 that failed are asked again"
    )
    assert merge.read(tmp_path).results.failures == []
    engine = FakeEngine()
    harness.run(config, engine, output=tmp_path, shard=shard)
    assert engine.prefills == []


def test_a_run_killed_before_it_asks_again_still_has_what_failed(tmp_path):
    config = small_config()
    harness.run(config, FakeEngine(fail_prefill={24}), output=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        harness.run(config, FakeEngine(stop_after=0), output=tmp_path)
    assert len(merge.read(tmp_path).results.failures) == 5


def test_an_unfinished_run_of_files_says_so(tmp_path, monkeypatch):
    config = small_config(tasks=shared_task(tmp_path, monkeypatch))
    with pytest.raises(KeyboardInterrupt):
        harness.run(config, FakeEngine(stop_after=1), output=tmp_path)
    run = merge.read(tmp_path)
    assert run.results.planned == {"shared": 5}
    (part,) = parts.parts(run.results)
    message = "The run is not finished: 2 of 5 planned samples are there."
    assert message in parts.warnings(part)
    harness.run(config, FakeEngine(), output=tmp_path)
    (part,) = parts.parts(merge.read(tmp_path).results)
    assert message not in parts.warnings(part)


def test_two_commands_do_not_write_one_run(tmp_path):
    config = small_config(tasks=[ONE])
    with durable.locked(tmp_path / "samples.jsonl"):
        with pytest.raises(ValueError, match="another command is writing") as error:
            harness.run(config, FakeEngine(), output=tmp_path)
        assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
        assert not (tmp_path / "samples.jsonl").exists()
    harness.run(config, FakeEngine(), output=tmp_path)


def test_a_part_that_is_being_written_is_not_dropped(tmp_path):
    config = small_config()
    harness.run(config, FakeEngine(), output=tmp_path, shard=(1, 2))
    part = tmp_path / "samples.1-of-2.jsonl"
    with durable.locked(part), pytest.raises(ValueError, match="another command is writing"):
        harness.run(config, FakeEngine(), output=tmp_path, overwrite=True)
    assert part.exists()


def test_a_context_that_is_too_long_is_cut_where_it_was_cut_before(tmp_path, monkeypatch):
    (task,) = shared_task(tmp_path, monkeypatch)
    load = TASKS["shared"].load

    def longer(path, subset):
        return [
            sample if not sample.id.endswith("two")
            else dataclasses.replace(sample, question="two and many more words than one")
            for sample in load(path, subset)
        ]  # fmt: skip

    longest_first = dataclasses.replace(TASKS["shared"], load=longer)
    monkeypatch.setitem(TASKS, "shared", longest_first)
    config = small_config(tasks=[{**task, "max_length": 60}])
    whole = harness.run(config, FakeEngine(), output=tmp_path)
    path = tmp_path / "samples.jsonl"
    lines = path.read_text().splitlines(True)
    # The shorter question of the first context is asked again, alone.
    path.write_text("".join(line for line in lines if '"id": "shared/a/one"' not in line))
    assert len(read_journal(path)[1]) == 4
    assert ignoring_times(harness.run(config, FakeEngine(), output=tmp_path)) == ignoring_times(
        whole
    )


def test_a_question_that_no_tokenizer_takes_is_one_failed_sample(tmp_path, monkeypatch):
    """Half a surrogate pair, which JSON may hold and UTF-8 may not."""
    (task,) = shared_task(tmp_path, monkeypatch)
    load = TASKS["shared"].load

    def broken(path, subset):
        return [
            dataclasses.replace(s, id=s.id + "/\ud83d", question="\ud83d")
            if s.id == "shared/a/one" else s
            for s in load(path, subset)
        ]  # fmt: skip

    monkeypatch.setitem(TASKS, "shared", dataclasses.replace(TASKS["shared"], load=broken))

    class Strict(FakeEngine):
        def __init__(self):
            super().__init__()
            encode = self.tokenizer.encode
            self.tokenizer.encode = lambda text, **options: (text.encode(), encode(text))[1]

    results = harness.run(small_config(tasks=[task]), Strict(), output=tmp_path)
    assert [s.failed for s in results.samples] == [True, False, False, False, False]
    assert "surrogates not allowed" in results.samples[0].records[0].error
    (read,) = merge.merge([merge.read(tmp_path)])
    assert read == results


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_a_failed_answer(tmp_path, monkeypatch, score):
    task = dataclasses.replace(TASKS["needle"], score=lambda sample, text: score)
    monkeypatch.setitem(TASKS, "needle", task)
    results = harness.run(small_config(tasks=[ONE]), FakeEngine(), output=tmp_path)
    assert "allowed are numbers in [0, 1]" in results.samples[0].records[0].error


def test_metadata_that_json_cannot_hold_is_kept_as_text(tmp_path, monkeypatch):
    (task,) = shared_task(tmp_path, monkeypatch)
    load = TASKS["shared"].load
    odd = {"length": float("nan"), "raw": b"bytes", "year": 2024}

    def dated(path, subset):
        return [dataclasses.replace(s, metadata=odd) for s in load(path, subset)]

    monkeypatch.setitem(TASKS, "shared", dataclasses.replace(TASKS["shared"], load=dated))
    results = harness.run(small_config(tasks=[task]), FakeEngine(), output=tmp_path)
    assert results.samples[0].metadata == {"length": "nan", "raw": "b'bytes'", "year": 2024}
