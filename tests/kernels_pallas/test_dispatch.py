"""Which implementation runs: asked for, overridden, by platform, or the portable one."""

from __future__ import annotations

import sys
import types

import pytest

from kernels_pallas import dispatch


@pytest.fixture
def operation(monkeypatch):
    """An operation of three implementations; the GPU kernel declines odd numbers."""

    def package(name: str, answer) -> None:
        module = types.ModuleType(name)
        module.answer = answer
        monkeypatch.setitem(sys.modules, f"made_up.{name}", module)

    def declining(number: int) -> tuple[str, int]:
        if number % 2:
            raise NotImplementedError(f"{number} is odd")
        return ("gpu", number)

    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    package("reference", lambda number: ("reference", number))
    package("pallas_mosaic_tpu", lambda number: ("tpu", number))
    package("pallas_mosaic_gpu", declining)
    return dispatch.Operation("answer", "made_up", ("reference", "mosaic_tpu", "mosaic_gpu"))


def test_without_a_kernel_for_the_platform_the_portable_one_runs(operation):
    assert operation(2, implementation=None, portable="reference") == ("reference", 2)
    assert dispatch.choices()["answer"] == dispatch.Choice("reference", "no kernel for cpu")


def test_a_platform_runs_its_kernel_and_what_it_declines_falls_back(operation, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "gpu")
    assert operation(2, implementation=None, portable="reference") == ("gpu", 2)
    assert operation(3, implementation=None, portable="reference") == ("reference", 3)
    assert dispatch.choices()["answer"].reason == "mosaic_gpu: 3 is odd"


def test_a_named_implementation_never_falls_back(operation, monkeypatch):
    assert operation(3, implementation="mosaic_tpu", portable="reference") == ("tpu", 3)
    with pytest.raises(NotImplementedError, match="3 is odd"):
        operation(3, implementation="mosaic_gpu", portable="reference")
    monkeypatch.setenv(dispatch.VARIABLE, "other=reference, answer=mosaic_gpu")
    with pytest.raises(NotImplementedError, match="3 is odd"):
        operation(3, implementation=None, portable="reference")


def test_the_environment_can_leave_kernels_out_or_name_one(operation, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "answer=mosaic_tpu")
    assert operation(2, implementation=None, portable="reference") == ("tpu", 2)
    monkeypatch.setenv(dispatch.VARIABLE, "portable")
    assert operation(2, implementation=None, portable="reference") == ("reference", 2)


@pytest.mark.parametrize("asked", ["fast", "answer=fast"])
def test_unknown_names_are_refused_with_what_is_allowed(operation, monkeypatch, asked):
    monkeypatch.setenv(dispatch.VARIABLE, asked)
    with pytest.raises(ValueError, match=r"'fast'.*allowed are"):
        operation(2, implementation=None, portable="reference")
    with pytest.raises(ValueError, match=r"'fastest': allowed are 'reference'"):
        operation(2, implementation="fastest", portable="reference")
