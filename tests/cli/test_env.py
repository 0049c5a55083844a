"""`kvjax env` names each operation's implementation and says why."""

from __future__ import annotations

import pytest

from kernels_pallas import dispatch
from kvjax.cli.main import main


@pytest.fixture(autouse=True)
def no_choices(monkeypatch):
    monkeypatch.setattr(dispatch, "_choices", {})


def choices(capsys) -> dict[str, tuple[str, str]]:
    assert main(["env"]) == 0
    _, table = capsys.readouterr().out.split("\n\n")
    rows = [line.split(None, 2) for line in table.splitlines()]
    return {name: (implementation, reason) for name, implementation, reason in rows}


def test_without_an_accelerator_everything_is_portable(monkeypatch, capsys):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    found = choices(capsys)
    assert sorted(found) == sorted(dispatch.OPERATIONS)
    assert not {implementation for implementation, _ in found.values()} & set(
        dispatch.KERNELS.values()
    )
    assert {reason for _, reason in found.values()} == {"no kernel for cpu"}


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_what_the_project_is_chosen_for_has_a_kernel_on_each_accelerator(
    platform, monkeypatch, capsys
):
    monkeypatch.setenv(dispatch.VARIABLE, platform)
    found = choices(capsys)
    for name in (
        "window_scores",
        "compact",
        "decode_attention",
        "paged_attention",
        "retention_attention",
        "pooled_max",
    ):
        assert found[name] == (f"mosaic_{platform}", f"the kernel for {platform}")
    maintained = {"tpu": "splash", "gpu": "cudnn"}[platform]
    assert maintained in " ".join(found["causal_attention"])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("fast", "'fast': allowed are"),
        ("decode_atention=dense", "'decode_atention=dense' names operation 'decode_atention': all"),
    ],
)
def test_an_unknown_override_is_one_line(asked, said, monkeypatch, capsys):
    monkeypatch.setenv(dispatch.VARIABLE, asked)
    assert main(["env"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvjax: error: KVJAX_KERNELS={said}") and error.count("\n") == 1
