"""Which implementation runs: asked for, overridden, by platform, or the portable one."""

from __future__ import annotations

import sys
import types

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import dispatch
from kernels_pallas.attention import causal_attention


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
    monkeypatch.setattr(dispatch, "OPERATIONS", ("answer", "other"))
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


def test_an_override_of_an_operation_that_there_is_not_is_refused(operation, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "answer=mosaic_tpu,anser=reference")
    with pytest.raises(ValueError, match=r"names operation 'anser': allowed are answer, other$"):
        operation(2, implementation=None, portable="reference")
    with pytest.raises(ValueError, match=r"operation 'question': name it in dispatch.OPERATIONS"):
        dispatch.Operation("question", "made_up", ("reference",))


@pytest.fixture
def on_gpu(monkeypatch):
    """A machine with a GPU of some compute capability."""

    def has(capability: str) -> None:
        device = types.SimpleNamespace(device_kind="Some GPU", compute_capability=capability)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda: [device])

    return has


@pytest.mark.parametrize("capability", ["8.0", "8.9", "10.0", "12.0", "gfx942"])
def test_gpus_other_than_hopper_take_the_portable_implementations(operation, on_gpu, capability):
    on_gpu(capability)
    said = (
        "the GPU kernels are for Hopper (sm_90a), this is Some GPU of compute capability "
        f"{capability}"
    )
    assert operation(2, implementation=None, portable="reference") == ("reference", 2)
    assert dispatch.choices()["answer"] == dispatch.Choice("reference", f"mosaic_gpu: {said}")
    with pytest.raises(NotImplementedError) as refused:
        operation(2, implementation="mosaic_gpu", portable="reference")
    assert str(refused.value) == said


def test_hopper_takes_them_and_so_does_a_compilation_for_it(operation, on_gpu, monkeypatch):
    on_gpu("9.0")
    assert operation(2, implementation=None, portable="reference") == ("gpu", 2)
    on_gpu("8.0")
    monkeypatch.setenv(dispatch.VARIABLE, "gpu")
    assert operation(2, implementation=None, portable="reference") == ("gpu", 2)


def test_prompt_attention_says_why_it_takes_no_maintained_kernel(monkeypatch):
    def prompt(dtype):
        tensor = jax.ShapeDtypeStruct((1, 2, 8, 16), dtype)
        at = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        jax.eval_shape(lambda *a: causal_attention(*a), tensor, tensor, tensor, at)
        return dispatch.choices()["causal_attention"]

    monkeypatch.setenv(dispatch.VARIABLE, "gpu")
    reason = "cudnn: cuDNN attention takes bfloat16 and float16, not float32"
    assert prompt(jnp.float32) == dispatch.Choice("reference", reason)
    monkeypatch.setenv(dispatch.VARIABLE, "causal_attention=blockwise")
    reason = "KVJAX_KERNELS=causal_attention=blockwise"
    assert prompt(jnp.float32) == dispatch.Choice("blockwise", reason)
    monkeypatch.setenv(dispatch.VARIABLE, "causal_attention=cudnn")
    with pytest.raises(NotImplementedError, match="not float32"):
        prompt(jnp.float32)
