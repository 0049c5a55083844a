"""Kernels over several devices: each device runs the kernel on its rows and its heads.

The compiler cannot split a kernel. Rows B and KV heads K of a kernel's arrays are independent of
each other, so in a program over a mesh the kernel runs under `jax.shard_map`, each device on its
part: rows lie over the mesh axes `data` and `fsdp`, heads over `tensor`, and every other axis is
whole on every device. Arrays that lie so already are not exchanged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

type Axes = Sequence[str]  # a letter for each axis of an array

_LIES = {"B": ("data", "fsdp"), "K": ("tensor",)}


def partitioned(
    axes: str | Callable[..., str],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function of arrays with their axes, as in "B H Q D, B K S D -> B H Q".

    The letters of each array are in the order of the flattened positional arguments: none for a
    scalar; None and Python's values may be passed for arrays, and the last may be left out. There
    are K KV heads, and H = K G query heads lie with them, as do N, which are K or H. Heads are
    needed whole where a result has none. Keyword arguments are scalars and static values. Where
    axes depend on the arguments, `axes` is a function of them.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            mesh = mesh_of(arguments)
            if mesh is None:
                return function(*arguments, **options)
            scalars = {k: v for k, v in options.items() if isinstance(v, jax.Array)}
            static = {k: v for k, v in options.items() if k not in scalars}

            def run(scalars: dict[str, Any], *arguments: Any) -> Any:
                return function(*arguments, **scalars, **static)

            text = axes if isinstance(axes, str) else axes(*arguments)
            operands, results = ([a.split() for a in side.split(",")] for side in text.split("->"))
            operands = [*([] for _ in scalars), *operands]
            return _on_parts(run, (scalars, *arguments), operands, results, mesh)

        return call

    return decorate


def mesh_of(arrays: Any) -> AbstractMesh | None:
    """The mesh over which arrays lie that the compiler places, if it has several devices."""
    for leaf in jax.tree.leaves(arrays):
        mesh = jax.typeof(leaf).sharding.mesh if isinstance(leaf, jax.Array) else None
        if mesh is not None and mesh.size > 1:
            # Within jax.shard_map an array is a device's part already.
            return mesh if set(mesh.axis_types) == {AxisType.Auto} else None
    return None


def leading(count: int) -> str:
    """Letters of the axes [*n] before an operation's own: the last of layers, rows and heads."""
    return " ".join(("L", "B", "K")[3 - count :])


def _on_parts(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    operands: Sequence[Axes],
    results: Sequence[Axes],
    mesh: AbstractMesh,
) -> Any:
    leaves, tree = jax.tree.flatten(tuple(arguments), is_leaf=lambda leaf: leaf is None)
    is_array = [isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves]
    arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
    # (Arguments that were left out have letters and no leaf.)
    operands = [letters for letters, array in zip(operands, is_array, strict=False) if array]

    def on_part(*parts: Any) -> Any:
        left = iter(parts)
        pairs = zip(leaves, is_array, strict=True)
        inputs = [next(left) if array else leaf for leaf, array in pairs]
        return function(*jax.tree.unflatten(tree, inputs))

    lies = _lies(arrays, operands, results, mesh)
    into = tuple(PartitionSpec(*(lies.get(x) for x in letters)) for letters in operands)
    out = tuple(PartitionSpec(*(lies.get(x) for x in letters)) for letters in results)
    return jax.shard_map(
        on_part,
        mesh=mesh,
        in_specs=into,
        out_specs=out[0] if len(out) == 1 else out,
        check_vma=False,
    )(*arrays)


def _lies(
    arrays: Sequence[Any], operands: Sequence[Axes], results: Sequence[Axes], mesh: AbstractMesh
) -> dict[str, tuple[str, ...]]:
    """The mesh axes of each letter; none where these do not divide its size."""
    sizes = {
        letter: size
        for letters, array in zip(operands, arrays, strict=True)
        for letter, size in zip(letters, array.shape, strict=True)
    }
    lies = {}
    for letter, names in _LIES.items():
        there = tuple(name for name in names if mesh.shape.get(name, 1) > 1)
        if there and sizes.get(letter, 1) % math.prod(mesh.shape[name] for name in there) == 0:
            lies[letter] = there
    if "K" in lies and all(set("KHN") & set(letters) for letters in results):
        return lies | {"H": lies["K"], "N": lies["K"]}
    lies.pop("K", None)
    return lies
