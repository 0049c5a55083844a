"""Command-line values that several commands share."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax import Budget, Policy


def policy_of(name: str, settings: Iterable[str] = (), **options: Any) -> Policy:
    """The named policy with settings given as NAME=VALUE."""
    import kvjax

    for setting in settings:
        option, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"policy option {setting!r}: allowed is NAME=VALUE")
        try:
            options[option.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[option.strip()] = value
    return kvjax.policy(name, **options)


def budget_of(text: str | None, policies: Iterable[Policy]) -> Budget:
    """The budget; it may be left out where every policy keeps everything."""
    import kvjax

    needing = [policy.name for policy in policies if policy.scorer is not None]
    if text is None and needing:
        raise ValueError(f"--policy {needing[0]} needs a --budget, such as 25%, 256 or 64MiB")
    return kvjax.Budget.parse("100%" if text is None else text)
