"""NumPy definitions in float64, one loop per head: what every implementation has to equal."""

from __future__ import annotations

import numpy as np


def sees(query: int, key: int, window: int) -> bool:
    """Whether a query at one position sees the key at another."""
    return 0 <= key <= query and query - key < window


def attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    query_positions: np.ndarray,
    key_positions: np.ndarray,
    window: int = 2**30,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output [B, H, Q, D], log-sum-exp [B, H, Q] and weights [B, H, Q, S] in float64."""
    queries, keys, values = (np.asarray(a, np.float64) for a in (queries, keys, values))
    batch, heads, count, size = queries.shape
    kv_heads, slots = keys.shape[1:3]
    out = np.zeros((batch, heads, count, size))
    lse = np.full((batch, heads, count), -np.inf)
    weights = np.zeros((batch, heads, count, slots))
    for row, head, query in np.ndindex(batch, heads, count):
        of = head // (heads // kv_heads)
        at = query_positions[row, query]
        seen = [s for s in range(slots) if sees(at, key_positions[row, of, s], window)]
        if not seen:
            continue
        logits = keys[row, of, seen] @ queries[row, head, query] / np.sqrt(size)
        top = logits.max()
        share = np.exp(logits - top)
        lse[row, head, query] = top + np.log(share.sum())
        weights[row, head, query, seen] = share / share.sum()
        out[row, head, query] = (share / share.sum()) @ values[row, of, seen]
    return out, lse, weights


def kept(scores: np.ndarray, rank: np.ndarray, valid: np.ndarray, budget: int) -> np.ndarray:
    """Mask [S] of one head's kept slots, from a sort of tuples."""

    def order(slot: int) -> tuple[int, int, float, int]:
        score = float(scores[slot])
        finite = bool(np.isfinite(score))
        protected = int(rank[slot])
        # Protected entries do not look at their score, nor non-finite ones at each other's.
        value = score if finite and protected == 0 else 0.0
        return (-protected, 0 if finite or protected else 1, -value, slot)

    best = sorted(np.flatnonzero(valid), key=order)[: max(budget, 0)]
    mask = np.zeros(len(scores), bool)
    mask[best] = True
    return mask
