"""Every command gives a policy the arrays that it brings along."""

from __future__ import annotations

import dataclasses
import io

import jax
import numpy as np
import pytest

import kvjax
from eval import engine, haystacks
from kvjax.cli import options
from kvjax.learned.memory import MemoryConfig
from kvjax.learned.modules import Card, fingerprints, save_module
from kvjax.learned.retention import GateConfig, init_gates
from kvjax.policies.latent_memory import LatentMemory
from kvjax.session import Session
from tests import tiny
from tests.models.small import random_model, small_tokenizer


@pytest.fixture(autouse=True, scope="module")
def quick():
    with tiny.quick_compilation():
        yield


@pytest.fixture(params=["restkv", "qfilters", "retention-global", "snapkv+memory"])
def given(request, tmp_path, monkeypatch):
    """A policy's name, its options, and the arrays that every call has to get."""
    monkeypatch.setattr(engine, "calibration_tokens", lambda tokenizer: tokenizer.encode("brief"))
    settings = {"restkv": {"window": 4}, "qfilters": {}}
    chosen = settings.get(request.param)
    if request.param == "retention-global":
        write_gates(tmp_path / "gates")
        chosen = {"path": str(tmp_path / "gates")}
    elif chosen is None:
        write_memory(tmp_path / "memory")
        chosen = {"window": 4, "memory_path": str(tmp_path / "memory")}
    policy = kvjax.policy(request.param, **chosen)
    arrays = kvjax.policy_params(random_model(), policy, small_tokenizer().encode("brief"))
    assert arrays is not None
    return request.param, [f"{name}={value}" for name, value in chosen.items()], arrays


def write_gates(path):
    config = GateConfig(width=4)
    arrays = init_gates(
        config, jax.random.key(0), num_layers=3, num_kv_heads=2, hidden_size=32, bias=3.0
    )
    card = Card(
        module="retention-global",
        kind="retention",
        options=dataclasses.asdict(config),
        backbone="small",
        fingerprints=fingerprints(random_model()),
    )
    save_module(path, arrays, card)


def write_memory(path, config=MemoryConfig(size=6), **changed):
    card = Card(
        module="snapkv+memory",
        kind="memory",
        options=dataclasses.asdict(config),
        backbone="small",
        fingerprints=fingerprints(random_model()),
    )
    save_module(path, tiny.memory(config), dataclasses.replace(card, **changed))


def recorded(monkeypatch, owner, name):
    """The `params` of every call of `owner.name`."""
    seen, original = [], getattr(owner, name)

    def call(*arguments, params, **more):
        seen.append(params)
        return original(*arguments, params=params, **more)

    monkeypatch.setattr(owner, name, call)
    return seen


def same(seen, arrays):
    assert seen
    for one in seen:
        jax.tree.map(np.testing.assert_array_equal, one, arrays)


def test_inspect(run, folder, tmp_path, monkeypatch, given):
    name, settings, arrays = given
    seen = recorded(monkeypatch, kvjax, "compress")
    policy = ":".join([name, ",".join(settings)]) if settings else name
    ran = run(
        *("inspect", "--model", folder, "--policy", policy, "--budget", "25%"),
        *("--prompt", "The quick brown fox.", "--output", tmp_path / "page.html"),
        *("--question", "Who?", "--dilution", "brown"),
    )
    assert (ran.status, ran.err) == (0, "")
    same(seen, arrays)


def test_generate(run, folder, monkeypatch, given):
    name, settings, arrays = given
    parts = ("prefill", "extend", "stream")
    seen = [recorded(monkeypatch, kvjax, part) for part in parts]
    ran = run(
        *("generate", "--model", folder, "--policy", name, "--budget", "25%"),
        *(word for setting in settings for word in ("--option", setting)),
        *("--prompt", "The quick brown fox.", "--question", "Who?", "--max-new-tokens", 2),
    )
    assert (ran.status, ran.err) == (0, "")
    for calls in seen:
        same(calls, arrays)


def test_chat(run, folder, monkeypatch, given):
    name, settings, arrays = given
    seen = recorded(monkeypatch, Session, "__init__")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    ran = run(
        *("chat", "--model", folder, "--policy", name, "--budget", "40"),
        *(word for setting in settings for word in ("--option", setting)),
        *("--room", 16, "--max-new-tokens", 2),
    )
    assert ran.status == 0, ran.err
    same(seen, arrays)


def test_filters_are_calibrated_on_what_eval_shows_them(monkeypatch):
    shown = []
    monkeypatch.setattr(kvjax, "policy_params", lambda *given: shown.append(given[2]()))
    options.params_of(random_model(), kvjax.policy("qfilters"), small_tokenizer())
    assert len(shown[0]) == 1024
    assert small_tokenizer().decode(shown[0]) in "".join(haystacks.load("sentences").sentences)


# A memory's module, which says how the remainder is set


def test_a_trained_memory_sets_up_its_remainder(tmp_path):
    config = MemoryConfig(size=6, combine="convex")
    write_memory(tmp_path / "memory", config)
    path, model = str(tmp_path / "memory"), random_model()
    for policy, scorer in (
        (kvjax.policy("snapkv+memory", memory_path=path), None),
        (kvjax.policy("keydiff", remainder="memory", memory_path=path), None),
        (kvjax.policy("restkv", remainder="memory", memory_path=path), {"output_factor"}),
        (kvjax.load_policy(path, model)[0], None),
    ):
        assert policy.remainder.config == config
        arrays = kvjax.policy_params(model, policy)
        assert arrays.keys() == {"scorer", "memory"}
        assert scorer is None or arrays["scorer"].keys() == scorer
        jax.tree.map(np.testing.assert_array_equal, arrays["memory"], tiny.memory(config))


def test_a_memory_of_another_kind_or_with_other_settings_is_refused(tmp_path):
    write_gates(tmp_path / "gates")
    with pytest.raises(ValueError, match="kind 'retention'; needed is 'memory'"):
        kvjax.policy("snapkv+memory", memory_path=str(tmp_path / "gates"))
    with pytest.raises(FileNotFoundError, match="holds no trained module"):
        kvjax.policy("snapkv+memory", memory_path=str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="no weights of 'keydiff\\+memory'"):
        kvjax.policy_params(random_model(), kvjax.policy("keydiff", remainder="memory"))
    write_memory(tmp_path / "memory")
    other = LatentMemory(config=MemoryConfig(size=5), path=str(tmp_path / "memory"))
    with pytest.raises(ValueError, match=r"has MemoryConfig\(size=5.* trained with .*size=6"):
        kvjax.policy_params(random_model(), kvjax.policy("snapkv", remainder=other))
    write_memory(tmp_path / "foreign", fingerprints={"float32": "0" * 16})
    with pytest.raises(ValueError, match="trained for small"):
        kvjax.load_policy(tmp_path / "foreign", random_model())
