"""On the device every kernel gives what its definition gives."""

from __future__ import annotations

import jax
import pytest

from benchmarks.kernel_operations import OPERATIONS
from benchmarks.kernel_sizes import close
from tests.device.conftest import PLATFORM

CASES = [(name, size) for name, operation in OPERATIONS.items() for size in operation.checks]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_kernel_equals_reference(name, size):
    operation = OPERATIONS[name]
    function = operation.load()
    if function is None:
        pytest.skip(f"{operation.function} is not in this version")
    case = operation.case(function, operation.checks[size])
    arguments = jax.jit(case.make)(jax.random.key(1))

    def run(implementation):
        return jax.jit(lambda *a: case.call(*a, implementation=implementation))(*arguments)

    # The definition's float32 products are not to be tf32; kernels say what theirs are.
    with jax.default_matmul_precision("highest"):
        wanted = run("reference")
    try:
        found = run(operation.implementations(PLATFORM)[-1])
    except NotImplementedError as declined:
        pytest.skip(f"declined: {declined}")
    if case.agree is None:
        close(found, wanted)
    else:
        case.agree(arguments, found, wanted)
