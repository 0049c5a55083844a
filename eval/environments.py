"""What samples ran on: the facts of one process, and those of several side by side."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_DIFFERS = "differs between "


def versions(model: Any) -> dict[str, str]:
    """Of what can change a result: packages, device and dtype."""
    import jax  # which a report does without
    import numpy as np

    import kvjax

    device = jax.local_devices()[0]
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
        "kvjax": getattr(kvjax, "__version__", "unknown"),
        "device": f"{device.platform} ({device.device_kind})",
        "dtype": str(jax.tree.leaves(model)[0].dtype),
    }


def of_header(header: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The environments of a journal, in the order that its samples number them in.

    Journals of one environment only have it under "environment".
    """
    return [dict(one) for one in header.get("environments") or [header.get("environment", {})]]


def number(environments: list[dict[str, Any]], environment: Mapping[str, Any]) -> int:
    """The place of `environment` among others, to which it is added if it is new."""
    if environment not in environments:
        environments.append(dict(environment))
    return environments.index(dict(environment))


def used(
    environments: Sequence[Mapping[str, Any]], numbers: Iterable[int]
) -> list[Mapping[str, Any]]:
    """Those that samples with these numbers ran on; the last one where there are no samples."""
    found = sorted(set(numbers)) or [len(environments) - 1]
    return [environments[i] for i in found]


def joined(environments: Sequence[Mapping[str, Any]], what: str) -> dict[str, Any]:
    """Every fact once; where `what` disagree, all of its values, and their names."""
    names = dict.fromkeys(name for facts in environments for name in facts)
    found: dict[str, Any] = {}
    differing = []
    for name in names:
        values = list(dict.fromkeys(str(facts.get(name)) for facts in environments))
        if name.startswith(_DIFFERS):  # within one of them, which says nothing about the others
            there = [str(facts[name]) for facts in environments if name in facts]
            found[name] = ", ".join(dict.fromkeys(there))
            continue
        found[name] = environments[0].get(name) if len(values) == 1 else " / ".join(values)
        if len(values) > 1:
            differing.append(name)
    if differing:
        found[f"{_DIFFERS}{what}"] = ", ".join(differing)
    return found
