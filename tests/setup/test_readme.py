"""The README's Python runs as it stands, and what it points to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvjax.policies import registry

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.model
def test_the_decoding_example_answers(default_model, capsys):
    exec(python_blocks()[0], {})
    assert "Paris" in capsys.readouterr().out


def test_the_policy_example_is_a_policy(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    namespace: dict = {}
    exec(python_blocks()[1], namespace)
    assert namespace["policy"].name == "value-norm"
    assert namespace["policy"].schedule.decode_interval == 32


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make (\w+)", README):
        if target != "and":
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_folders_exist():
    for folder in re.findall(r"`(\w[\w/]*/)`", README):
        assert (ROOT / folder).is_dir(), folder
