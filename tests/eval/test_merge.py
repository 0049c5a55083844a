"""Runs are merged where they may be, kept apart where not, and never silently contradict."""

from __future__ import annotations

import dataclasses
import json

import pytest

from eval import harness, merge, parts, tables
from kvjax.cli.main import main
from tests.eval import handmade
from tests.eval.fakes import FakeEngine, small_config, untimed


def made(policies, numbers=range(3), budget=0.25, task="needle", score=1.0, **changes):
    samples = [
        handmade.sample(
            task,
            n,
            [handmade.record("full")]
            + [handmade.record(name, str(budget), score) for name in policies],
        )
        for n in numbers
    ]
    given = [{"name": "needle", "haystacks": ["noise"], "lengths": [4096], "depths": [0.5],
              "samples": 3}]  # fmt: skip
    return handmade.results(samples, policies=policies, budgets=(budget,), tasks=given, **changes)


def merged(*runs):
    return merge.merge(
        [
            merge.Run(name=f"run{i}", results=run, config_hash=run.config.hash)
            for i, run in enumerate(runs)
        ]
    )


def id_of(sample):
    return sample.id


def columns(sample):
    return [(r.policy, r.budget) for r in sample.records]


def write(path, run, samples=None, name="samples.jsonl"):
    handmade.write_journal(path / name, run, samples)
    return str(path)


def test_a_journal_gives_the_results_that_wrote_it(tmp_path):
    engine = FakeEngine(labels=("full", "first", "last", "broken"))
    config = small_config(policies=["first", "last", "broken"])
    expected = harness.run(config, engine, output=tmp_path)
    run = merge.read(tmp_path)
    assert run.config_hash == config.hash
    assert merge.merge([run]) == [expected]


def test_shards_are_one_run(tmp_path):
    config = small_config()
    whole = harness.run(config, FakeEngine(), output=tmp_path / "whole")
    for index in (1, 0, 2):
        harness.run(config, FakeEngine(), output=tmp_path / "parts", shard=(index, 3))
    (found,) = merge.merge([merge.read(tmp_path / "parts")])
    assert sorted(untimed(found), key=id_of) == sorted(untimed(whole), key=id_of)


def test_a_killed_run_is_reported_with_what_it_has(tmp_path, capsys):
    engine = FakeEngine(stop_after=5)
    with pytest.raises(KeyboardInterrupt):
        harness.run(small_config(), engine, output=tmp_path)
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"id": "cut sho')
    assert main(["report", str(tmp_path)]) == 0
    assert "5 of 24 planned samples" in (tmp_path / "results.md").read_text()
    assert str(tmp_path / "report.html") in capsys.readouterr().out


def test_runs_of_one_model_and_protocol_are_joined_by_sample():
    (found,) = merged(made(["snapkv"]), made(["h2o"], range(1, 4)), made(["snapkv"], budget=64))
    assert [s.seed for s in found.samples] == [0, 1, 2, 3]
    first, second, _, last = found.samples
    assert columns(first) == [("full", "full"), ("snapkv", "0.25"), ("snapkv", "64")]
    assert columns(second) == [
        ("full", "full"), ("snapkv", "0.25"), ("h2o", "0.25"), ("snapkv", "64"),
    ]  # fmt: skip
    assert columns(last) == [("full", "full"), ("h2o", "0.25")]
    assert [p.label for p in found.config.policies] == ["snapkv", "h2o"]
    assert found.config.budgets == (0.25, 64)


def test_what_was_not_run_has_a_dash():
    runs = merged(made(["snapkv", "h2o"]), made(["h2o"], [7], budget=64))
    (part,) = parts.parts(runs)
    (rows,) = part.rows.values()
    assert [(r.policy, r.budget, r.score and r.score.n) for r in rows] == [
        ("full", "full", 4),
        ("snapkv", "0.25", 3),
        ("h2o", "0.25", 3),
        ("snapkv", "64", None),
        ("h2o", "64", 1),
    ]
    (line,) = [x for x in tables.text(runs).split("\n") if "snapkv" in x and "64 tokens" in x]
    assert line.split()[3:] == ["–"] * 7
    assert any("dash" in warning for warning in parts.warnings(part))


def test_samples_that_a_task_leaves_out_are_said():
    run = made(["snapkv"])
    note = {"left_out": "30 questions are left out: no rule can judge them"}
    samples = tuple(dataclasses.replace(s, metadata=note) for s in run.samples)
    (part,) = parts.parts(dataclasses.replace(run, samples=samples))
    assert f"needle: {note['left_out']}." in parts.warnings(part)


def test_equal_answers_collapse_and_the_first_one_s_costs_stand():
    again = made(["snapkv"])
    slow = tuple(
        dataclasses.replace(
            s, records=tuple(dataclasses.replace(r, decode_seconds=9.0) for r in s.records)
        )
        for s in again.samples
    )
    (found,) = merged(made(["snapkv"]), dataclasses.replace(again, samples=slow))
    assert all(r.decode_seconds == 0.5 for s in found.samples for r in s.records)
    assert found.samples[0].records == again.samples[0].records


def test_different_answers_are_refused_by_sample_policy_and_runs():
    with pytest.raises(ValueError) as caught:
        merged(made(["h2o"]), made(["snapkv"]), made(["snapkv"], [2], score=0.0))
    message = str(caught.value)
    assert "needle/noise/4096/s2" in message and "snapkv" in message and "0.25" in message
    assert "run1" in message and "run2" in message and "run0" not in message


def test_an_answer_stands_where_another_run_failed():
    failed = made(["snapkv"], [0])
    (sample,) = failed.samples
    record = handmade.record("snapkv", "0.25", 0.0, error="out of memory", answer="")
    failed = dataclasses.replace(
        failed,
        samples=(dataclasses.replace(sample, records=(sample.records[0], record)),),
    )
    for runs in ((failed, made(["snapkv"], [0])), (made(["snapkv"], [0]), failed)):
        (found,) = merged(*runs)
        assert found.failures == [] and found.samples[0].records[1].score == 1
    (found,) = merged(failed, failed)
    assert len(found.failures) == 1


def test_a_sample_that_is_another_one_is_refused():
    other = made(["h2o"])
    samples = (dataclasses.replace(other.samples[0], prompt_tokens=77), *other.samples[1:])
    with pytest.raises(ValueError, match=r"s0 is not the same in run0 and run1: prompt_tokens"):
        merged(made(["snapkv"]), dataclasses.replace(other, samples=samples))


@pytest.mark.parametrize("other", ["ab", "cd", None])
def test_samples_of_another_haystack_are_refused(other):
    """By the hash of their text, where both have one."""

    def run(policy, sha):
        found = made([policy])
        metadata = {} if sha is None else {"haystack_sha256": sha}
        samples = (dataclasses.replace(s, metadata=metadata) for s in found.samples)
        return dataclasses.replace(found, samples=tuple(samples))

    runs = run("snapkv", "ab"), run("h2o", other)
    if other == "cd":
        with pytest.raises(ValueError, match="run0 and run1: haystack_sha256 'ab' and 'cd'"):
            merged(*runs)
    else:
        assert len(merged(*runs)) == 1


def test_runs_of_other_contents_are_refused():
    one = dataclasses.replace(
        made(["snapkv"]), identity={"model (bfloat16)": "a", "tokenizer": "b"}
    )
    two = dataclasses.replace(made(["h2o"]), identity={"model (bfloat16)": "c", "tokenizer": "b"})
    with pytest.raises(ValueError, match=r"run0 and run1 are not of the same model \(bfloat16\)"):
        merged(one, two)
    two = dataclasses.replace(two, identity={"policy h2o": "d"})
    (found,) = merged(one, two, made(["tova"]))
    assert found.identity == {**one.identity, **two.identity}


def test_what_merged_runs_planned_is_the_most_that_any_did():
    one = dataclasses.replace(made(["snapkv"]), planned={"needle": 3, "ruler/vt": 2})
    two = dataclasses.replace(made(["h2o"]), planned={"needle": 5})
    assert merged(one, two)[0].planned == {"needle": 5, "ruler/vt": 2}
    assert merged(one, made(["h2o"]))[0].planned == {}


def test_another_template_is_refused():
    other = dataclasses.replace(made(["h2o"]), prompt={"template": {"before_user": "Hi"}})
    with pytest.raises(ValueError, match="run0 and run1 differ in their prompt template"):
        merged(made(["snapkv"]), other)


@pytest.mark.parametrize("change", [{"question": "seen"}, {"seed": 5}, {"max_new_tokens": 7}])
def test_what_cannot_be_compared_stays_apart(change):
    found = merged(made(["snapkv"]), made(["h2o"], **change), made(["tova"]))
    assert [[p.label for p in run.config.policies] for run in found] == [
        ["snapkv", "tova"],
        ["h2o"],
    ]
    titles = [part.title for part in parts.parts(found)]
    assert len(set(titles)) == 2 and all(title.startswith("tiny, question ") for title in titles)


def test_environments_that_differ_are_shown_and_said():
    one, two = made(["snapkv"]), made(["h2o"])
    two = dataclasses.replace(two, environment={"commit": "def", "jax": "0"})
    (found,) = merged(one, two)
    assert found.environment["commit"] == "abc / def" and found.environment["jax"] == "0"
    assert [one["commit"] for one in found.environments] == ["abc", "def"]
    (part,) = parts.parts(found)
    assert any("runs differ in commit" in warning for warning in parts.warnings(part))


def test_an_absent_task_that_another_run_has_is_not_absent():
    one = dataclasses.replace(
        made(["snapkv"]), absent=(("ruler/qa_1", "no file"), ("ruler/qa_2", "no file"))
    )
    two = made(["h2o"], task="ruler/qa_1")
    (found,) = merged(one, two)
    assert found.absent == (("ruler/qa_2", "no file"),)


def test_time_of_merged_runs_adds_up():
    one, two = made(["snapkv"], [0]), made(["h2o"], [0])
    halves = dataclasses.replace(two.samples[0], batch=4, wall_seconds=20.0, model_seconds=4.0)
    (found,) = merged(one, dataclasses.replace(two, samples=(halves,)))
    assert found.overhead == pytest.approx(1 - (2.0 + 1.0) / (2.5 + 5.0))


def test_the_command_merges_into_one_directory(tmp_path, capsys):
    runs = [write(tmp_path / name, made([name])) for name in ("snapkv", "h2o")]
    runs.append(write(tmp_path / "seen", made(["tova"], question="seen")))
    output = tmp_path / "both"
    assert main(["report", *runs, "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "tiny, question hidden" in shown and "tiny, question seen" in shown
    content = json.loads((output / "results.json").read_text())
    hidden, seen = content["parts"]
    assert {s["policy"] for s in hidden["summaries"]} == {"full", "snapkv", "h2o"}
    assert {s["policy"] for s in seen["summaries"]} == {"full", "tova"}
    assert {path.name for path in output.iterdir()} == {
        "results.json", "results.md", "report.html",
    }  # fmt: skip


@pytest.mark.parametrize("fault", ["nothing", "empty", "format", "line", "header", "config"])
def test_what_cannot_be_read_is_named_in_one_line(tmp_path, capsys, fault):
    run = tmp_path / "run"
    write(run, made(["snapkv"]))
    path = run / "samples.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    header = json.loads(lines[0])
    content = {
        "nothing": None,
        "empty": "",
        "format": json.dumps({**header, "format": 1}) + "\n",
        "line": lines[0] + "{}\n" + lines[1],
        "header": "[]\n",
        "config": json.dumps({**header, "config": {"model": "m"}}) + "\n",
    }[fault]
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    assert main(["report", str(run)]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and str(run) in shown.err and "--overwrite" not in shown.err
    assert not (run / "report.html").exists()


def test_shards_of_different_configs_are_refused(tmp_path, capsys):
    write(tmp_path, made(["snapkv"]), name="samples.0-of-2.jsonl")
    write(tmp_path, made(["h2o"]), name="samples.1-of-2.jsonl")
    assert main(["report", str(tmp_path)]) == 2
    assert "samples.1-of-2.jsonl" in capsys.readouterr().err


def test_several_runs_need_an_output(tmp_path, capsys):
    runs = [write(tmp_path / name, made([name])) for name in ("snapkv", "h2o")]
    assert main(["report", *runs]) == 2
    assert "--output" in capsys.readouterr().err
