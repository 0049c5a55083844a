"""Run-time checks of the library's jaxtyping annotations, for the tests only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

# An int is a float, as type checkers see it too.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def install(packages: Sequence[str]) -> None:
    """Checks arguments and results of every annotated function; precedes the packages' import."""
    jax.tree_util.register_dataclass = _register_dataclass
    install_import_hook(packages, f"{__name__}.checked")


def _register_dataclass[C: type](
    cls: C,
    data_fields: Sequence[str] | None = None,
    meta_fields: Sequence[str] | None = None,
    drop_fields: Sequence[str] = (),
) -> C:
    """JAX's, except that rebuilding a tree calls the `__init__` from before it was checked.

    JAX fills trees with masks, axes and `ShapeDtypeStruct`s, which no shape annotation allows.
    """
    fields = [f for f in dataclasses.fields(cls) if f.init and f.name not in drop_fields]
    if data_fields is None or meta_fields is None:
        meta_fields = [f.name for f in fields if f.metadata.get("static", False)]
        data_fields = [f.name for f in fields if f.name not in meta_fields]
    data, meta = tuple(data_fields), tuple(meta_fields)
    unchecked_init = cls.__init__

    def flatten(tree: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(tree, n) for n in data], tuple(getattr(tree, n) for n in meta)

    def flatten_with_keys(tree: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children, static = flatten(tree)
        names = [jax.tree_util.GetAttrKey(n) for n in data]
        return list(zip(names, children, strict=True)), static

    def unflatten(static: tuple[Any, ...], children: Iterable[Any]) -> Any:
        tree = object.__new__(cls)
        unchecked_init(
            tree, **dict(zip(data, children, strict=True)), **dict(zip(meta, static, strict=True))
        )
        return tree

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
