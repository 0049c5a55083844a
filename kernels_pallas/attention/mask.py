"""Who may attend to what: the one rule that every attention path shares."""

from __future__ import annotations

from jaxtyping import Array, Bool, Int

NO_WINDOW = 2**30  # a sliding window that no context reaches


def visible(
    query_positions: Int[Array, "*#b Q"],
    key_positions: Int[Array, "*#b S"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> Bool[Array, "*b Q S"]:
    """A query at i sees the key at j iff 0 <= j <= i and j > i - window.

    Positions are absolute; -1 marks an empty slot or a padding query. With keys 0, 2, 5 and
    window 3, the query at 5 sees 5 only, the query at 4 sees 2, the query at -1 sees nothing.
    """
    query = query_positions[..., :, None]
    key = key_positions[..., None, :]
    return (key >= 0) & (key <= query) & (key > query - window)
