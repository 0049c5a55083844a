"""Floating-point operations of matrix products in a traced program, loops multiplied out."""

from __future__ import annotations

import math
from typing import Any

import jax


def flops(traced: jax.stages.Traced) -> float:
    """Of all devices together: 2 per multiplication of every matrix product.

    A `scan` counts as often as it runs, a `while` whose count is data once, of a `cond` the most
    expensive branch. A Pallas kernel counts as one step of its grid: leave kernels out
    (KVJAX_KERNELS=portable) where their products matter.
    """
    return _of(traced.jaxpr.jaxpr)


def _devices(params: dict[str, Any]) -> int:
    """Of the mesh over which a body runs, each device on its part."""
    return int(getattr(params.get("mesh"), "size", 1))


def _of(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            depth = math.prod(shape[axis] for axis in contracted)
            total += 2.0 * depth * equation.outvars[0].aval.size
        elif name == "cond":
            total += max(_of(branch.jaxpr) for branch in params["branches"])
        else:
            times = {"scan": params.get("length"), "shard_map": _devices(params)}.get(name, 1)
            for inner in jax.tree.leaves(
                list(params.values()), is_leaf=lambda value: hasattr(value, "eqns")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total += times * _of(inner)
    return total
