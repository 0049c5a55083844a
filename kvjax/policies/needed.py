"""Optional fields of an observation, where a scorer relies on them."""

from __future__ import annotations


def needed[T](field: T | None, need: str) -> T:
    """The field; ValueError if nobody gathered it."""
    if field is None:
        raise ValueError(f"the observation lacks what {need!r} stands for; name it in Scorer.needs")
    return field
