"""The full cache: nothing is ever evicted."""

from __future__ import annotations

from kvjax.policies.base import Policy, Protection
from kvjax.policies.registry import register


@register("full")
def full() -> Policy:
    """Keeps every entry, whatever the budget: the baseline of every comparison."""
    return Policy(name="full", scorer=None, protection=Protection(sinks=0))
