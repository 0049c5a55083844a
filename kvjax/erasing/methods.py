"""The methods by name."""

from __future__ import annotations

import dataclasses
import inspect

from kvjax.erasing.deletion import DeleteAndShift, Mask, NoErase
from kvjax.erasing.hybrid import Hybrid
from kvjax.erasing.method import Method
from kvjax.erasing.note import PromptNote
from kvjax.erasing.recomputation import CacheBlend, LocalRepair, Recompute
from kvjax.erasing.steering import KVEraser

METHODS: dict[str, type[Method]] = {
    kind.name: kind
    for kind in (
        KVEraser,
        Hybrid,
        NoErase,
        Mask,
        DeleteAndShift,
        LocalRepair,
        CacheBlend,
        Recompute,
        PromptNote,
    )
}


def erasing_method(name: str, **options: object) -> Method:
    """The named method with the given settings.

    Raises:
      ValueError: an unknown name or option, a missing one, or a value that is not allowed.
    """
    if name not in METHODS:
        raise ValueError(f"unknown erasing method {name!r}; allowed: {', '.join(METHODS)}")
    kind = METHODS[name]
    known = inspect.signature(kind).parameters
    if wrong := sorted(options.keys() - known.keys()):
        allowed = ", ".join(known) or "none"
        raise ValueError(f"method {name!r} has no option {wrong[0]!r}; allowed: {allowed}")
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.name not in options:
            raise ValueError(f"method {name!r} needs the option {field.name!r}")
    return kind(**options)
