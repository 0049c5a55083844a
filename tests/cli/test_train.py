"""`kvjax train`: from a YAML file to a policy that answers."""

from __future__ import annotations

import pytest
import yaml

import kvjax
from kvjax.cli.main import main

GOOD = {
    "model": "smollm2-135m-instruct",
    "module": {"kind": "retention", "name": "retention-local", "width": 8, "memory": 16},
    "data": [{"task": "needle", "haystacks": ["sentences"], "lengths": [120, 140]}],
    "length": 160,
    "steps": 2,
    "log": 1,
}


def written(tmp_path, **changes):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(GOOD | {"output": str(tmp_path / "run")} | changes))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"module": {"kind": "poem"}}, [], "module.kind='poem'"),
        ({"module": {}}, [], "module={}"),
        ({"module": {"kind": "retention", "widht": 3}}, [], "did you mean 'width'"),
        ({"module": {"kind": "retention", "width": 0.5}}, [], "module.width=0.5: allowed: whole"),
        ({"module": {"kind": "retention", "gate": "rg2"}}, [], "module.gate='rg2'"),
        ({"optimizer": {"schedule": "step"}}, [], "optimizer.schedule='step'"),
        ({"optimizer": {"learning_rate": 0}}, [], "optimizer.learning_rate=0"),
        ({"checkpoint": {"steps": 0}}, [], "checkpoint.steps=0: allowed: integers >= 1"),
        ({"checkpoint": {"minutes": 0}}, [], "checkpoint.minutes=0.0: allowed: numbers > 0"),
        ({"checkpoint": {"keep": 0}}, [], "checkpoint.keep=0: allowed: integers >= 1"),
        ({"mesh": {"model": 2}}, [], "mesh='model'"),
        ({"mesh": {"data": 4096}}, [], "batch=1: allowed are multiples of 4096"),
        ({"mesh": {"sequence": 3}}, [], "length=160: allowed are multiples of mesh.sequence=3"),
        ({"steps": 0}, [], "steps=0: allowed: integers >= 1"),
        ({"data": []}, [], "data=[]"),
        ({"model": "no-such-model"}, [], "no-such-model"),
        ({"colour": 1}, [], "unknown key 'colour'"),
        ({}, ["--steps", "0"], "--steps=0"),
        ({}, ["--output", " "], "--output=' '"),
    ],
)
def test_bad_input(tmp_path, capsys, changes, arguments, message):
    path = written(tmp_path, **changes)
    assert main(["train", path, *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and shown.out == ""
    assert not (tmp_path / "run").exists()


def test_a_missing_file_is_named(capsys):
    assert main(["train", "/no/such.yaml"]) == 2
    assert "/no/such.yaml" in capsys.readouterr().err


@pytest.mark.model
@pytest.mark.slow
def test_a_short_run_exports_a_policy(tmp_path, capsys, default_model):
    path = written(tmp_path)
    assert main(["train", path, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "module      retention," in shown and "2 of 1 x 160 tokens" in shown
    assert main(["train", path]) == 0
    assert "exported after 2 steps" in capsys.readouterr().out
    model, tokenizer = default_model
    policy, gates = kvjax.load_policy(tmp_path / "run" / "export", model)
    prompt = tokenizer.encode("The sky is blue. " * 20)
    _, cache = kvjax.prefill(model, [prompt], policy=policy, budget=0.5, room=4, params=gates)
    assert int(cache.lengths.max()) <= len(prompt) // 2 + 1
    named = kvjax.policy("retention-local", path=str(tmp_path / "run" / "export"))
    assert kvjax.policy_params(model, named).keys() == gates.keys()
