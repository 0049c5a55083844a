"""Options that are whole numbers."""

from __future__ import annotations

import numbers


def check_whole(name: str, value: object, least: int) -> None:
    """Refuses what is no integer, as 2.5 or True, or below `least`.

    Raises:
      ValueError: one line with name, value and what is allowed.
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not (whole and value >= least):  # type: ignore[operator]
        raise ValueError(f"{name}={value}: allowed are integers >= {least}")
