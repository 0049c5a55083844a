"""What each method's scores are, for one row, in plain NumPy and float64.

`o` is `observations.mirror(observation, row)`. Entries of empty slots are unspecified.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np

from tests.policies.observations import rotate

MASK = 2**32 - 1


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def window_weights(o: SimpleNamespace) -> list[list[dict[int, float]]]:
    """weights[h][w][slot] of every query that exists over every slot it may see."""
    heads, window, head_dim = o.queries.shape
    groups = heads // o.keys.shape[0]
    result = []
    for h in range(heads):
        rows = []
        for w in range(window):
            if o.query_positions[w] < 0:
                continue
            k = h // groups
            seen = [
                s for s in range(o.keys.shape[1]) if 0 <= o.positions[k, s] <= o.query_positions[w]
            ]
            if seen:
                logits = [o.queries[h, w] @ o.keys[k, s] / np.sqrt(head_dim) for s in seen]
                rows.append(dict(zip(seen, softmax(np.array(logits)), strict=True)))
            else:
                rows.append({})
        result.append(rows)
    return result


def random(o: SimpleNamespace, *, seed: int = 0) -> np.ndarray:
    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
        x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
        return x ^ (x >> 16)

    scores = np.zeros(o.positions.shape)
    for (k, s), position in np.ndenumerate(o.positions):
        bits = mix((seed & MASK) ^ 0x9E3779B9)
        bits = mix(bits ^ int(o.layer))
        bits = mix(bits ^ k)
        bits = mix(bits ^ (int(position) & MASK))
        scores[k, s] = (bits >> 8) / 2**24
    return scores


def streaming(o: SimpleNamespace) -> np.ndarray:
    return o.positions.astype(float)


def knorm(o: SimpleNamespace) -> np.ndarray:
    return -np.linalg.norm(o.keys, axis=-1)


def keydiff(o: SimpleNamespace) -> np.ndarray:
    scores = np.zeros(o.positions.shape)
    for k in range(len(scores)):
        valid = np.flatnonzero(o.positions[k] >= 0)
        unit = {s: o.keys[k, s] / np.linalg.norm(o.keys[k, s]) for s in valid}
        anchor = np.mean(list(unit.values()), axis=0)
        for s in valid:
            scores[k, s] = -unit[s] @ anchor / np.linalg.norm(anchor)
    return scores


def h2o(o: SimpleNamespace) -> np.ndarray:
    """Column sums over this call's queries, which RoPE turns to their positions."""
    heads = o.queries_pre_rope.shape[0]
    groups = heads // o.keys.shape[0]
    scores = np.zeros(o.positions.shape)
    for h in range(heads):
        k = h // groups
        for t, position in enumerate(o.new_positions):
            if position < 0:
                continue
            seen = np.flatnonzero((o.positions[k] >= 0) & (o.positions[k] <= position))
            if len(seen) == 0:
                continue
            query = rotate(o.queries_pre_rope[h, t], position, o.rope_frequencies)
            logits = o.keys[k, seen] @ query / np.sqrt(query.size)
            scores[k, seen] += softmax(logits) / groups
    return scores


def tova(o: SimpleNamespace) -> np.ndarray:
    groups = o.queries.shape[0] // o.keys.shape[0]
    by_token: dict[int, float] = {}
    for h, rows in enumerate(window_weights(o)):
        for s, weight in (rows[-1] if rows else {}).items():
            token = o.positions[h // groups, s]
            by_token[token] = by_token.get(token, 0.0) + weight / o.queries.shape[0]
    return np.vectorize(lambda token: by_token.get(token, 0.0))(o.positions)


def pooled(x: np.ndarray, kernel: int, kind: str) -> np.ndarray:
    result = np.zeros_like(x)
    for s in range(len(x)):
        near = [i for i in range(s - kernel // 2, s + kernel // 2 + 1) if 0 <= i < len(x)]
        result[s] = sum(x[near]) / kernel if kind == "avg" else max(x[near])
    return result


def snapkv(
    o: SimpleNamespace, *, window: int = 32, kernel: int = 5, pooling: str = "avg"
) -> np.ndarray:
    groups = o.queries.shape[0] // o.keys.shape[0]
    mean = np.zeros(o.positions.shape)
    for h, rows in enumerate(window_weights(o)):
        for row in rows:
            for s, weight in row.items():
                mean[h // groups, s] += weight / (len(rows) * groups)
    scores = mean.copy()
    for k in range(len(scores)):
        evictable = (o.positions[k] >= 0) & (o.positions[k] < o.next_position - window)
        smooth = pooled(np.where(evictable, mean[k], 0.0), kernel, pooling)
        scores[k, evictable] = smooth[evictable]
    return scores


def chunkkv(o: SimpleNamespace, *, window: int = 32, chunk_size: int = 10) -> np.ndarray:
    base = snapkv(o, window=window)
    by_token: dict[int, float] = {}
    for (k, s), token in np.ndenumerate(o.positions):
        by_token[token] = by_token.get(token, 0.0) + base[k, s]
    scores = np.zeros(o.positions.shape)
    for k, positions in enumerate(o.positions):
        chunks: dict[tuple[int, bool], list[int]] = {}
        for s, token in enumerate(positions):
            if token >= 0:
                name = (token // chunk_size, token >= o.next_position - window)
                chunks.setdefault(name, []).append(s)
        for members in chunks.values():
            scores[k, members] = np.mean([by_token[positions[s]] for s in members])
    return scores


def lagkv(o: SimpleNamespace, *, lag: int = 128, skip: int = 4) -> np.ndarray:
    scores = 1.0 + o.positions.astype(float)
    for k, positions in enumerate(o.positions):
        entries = [s for s, token in enumerate(positions) if token >= skip]
        parts = [entries[i : i + lag] for i in range(0, len(entries), lag)]
        parts = [part for part in parts if len(part) == lag]
        for part, following in pairwise(parts):
            total = np.zeros(lag)
            for x in (o.keys[k], o.values[k]):
                low, high = x[following].min(axis=0), x[following].max(axis=0)
                scaled = (x[part] - low) / (high - low)
                total += softmax(scaled.std(axis=-1, ddof=1)) / 2
            for rank, place in enumerate(np.argsort(total, kind="stable")):
                scores[k, part[place]] = rank / lag
    return scores


def rkv(
    o: SimpleNamespace,
    *,
    window: int = 8,
    lam: float = 0.1,
    kernel: int = 7,
    threshold: float = 0.5,
) -> np.ndarray:
    heads, count, head_dim = o.queries.shape
    groups = heads // o.keys.shape[0]
    scores = np.zeros(o.positions.shape)
    for k, positions in enumerate(o.positions):
        valid = np.flatnonzero(positions >= 0)
        older = np.flatnonzero((positions >= 0) & (positions < o.next_position - window))
        asked = [w for w in range(count) if o.query_positions[w] >= 0]
        importance = np.zeros(len(positions))
        if len(older):
            for w in asked:
                group = o.queries[k * groups : (k + 1) * groups, w]
                logits = (group @ o.keys[k, older].T / np.sqrt(head_dim)).max(axis=0)
                importance[older] += softmax(logits) / len(asked)
        importance = pooled(importance, kernel, "max")
        unit = o.keys[k, valid] / np.linalg.norm(o.keys[k, valid], axis=-1, keepdims=True)
        cosine = unit @ unit.T
        np.fill_diagonal(cosine, 0.0)
        for row in cosine:
            near = np.flatnonzero(row > threshold)
            if len(near):
                row[near[-1]] = 0.0
        redundancy = np.zeros(len(positions))
        redundancy[valid] = softmax(cosine.mean(axis=0))
        scores[k] = lam * importance - (1 - lam) * redundancy
    return scores


def qfilters(o: SimpleNamespace, *, filters: np.ndarray) -> np.ndarray:
    return np.stack([keys @ f for keys, f in zip(o.keys, filters, strict=True)])


def keys_before_rope(o: SimpleNamespace) -> np.ndarray:
    return rotate(o.keys, -np.maximum(o.positions, 0), o.rope_frequencies)


def leverage(o: SimpleNamespace, *, ridge: float = 1e-3) -> np.ndarray:
    scores = np.zeros(o.positions.shape)
    for k, keys in enumerate(keys_before_rope(o)):
        valid = np.flatnonzero(o.positions[k] >= 0)
        gram = keys[valid].T @ keys[valid]
        gram = gram + ridge * np.trace(gram) / len(gram) * np.eye(len(gram))
        for s in valid:
            scores[k, s] = keys[s] @ np.linalg.solve(gram, keys[s])
    return scores


def compactor(o: SimpleNamespace, *, chunk_size: int = 256, blend: float = 0.35) -> np.ndarray:
    heads, tokens, head_dim = o.queries_pre_rope.shape
    groups = heads // o.keys.shape[0]
    keys = keys_before_rope(o)
    outlier, received = leverage(o), np.zeros(o.positions.shape)
    first = o.positions.shape[1] - tokens
    for k in range(len(keys)):
        for begin in range(0, tokens, chunk_size):
            chunk = range(begin, min(begin + chunk_size, tokens))
            held = [first + t for t in chunk if o.positions[k, first + t] >= 0]
            if not held:
                continue
            for h in range(k * groups, (k + 1) * groups):
                for t in chunk:
                    if o.new_positions[t] >= 0:
                        query = o.queries_pre_rope[h, t]
                        logits = keys[k, held] @ query / np.sqrt(head_dim)
                        received[k, held] += softmax(logits) / groups
    scores = np.zeros(o.positions.shape)
    for k in range(len(keys)):
        valid = np.flatnonzero(o.positions[k] >= 0)
        for x, weight in ((outlier[k, valid], 1.0), (received[k, valid], blend)):
            if x.std() > 1e-6:
                scores[k, valid] += weight * (x - x.mean()) / x.std()
    return scores


def duoattention(
    o: SimpleNamespace,
    *,
    sinks: int = 128,
    recent: int = 256,
    length: int = 500,
    sparsity: float = 0.5,
) -> np.ndarray:
    heads, _, head_dim = o.queries_pre_rope.shape
    kv_heads = len(o.keys)
    groups = heads // kv_heads
    keys = keys_before_rope(o)
    area = np.zeros(kv_heads)
    for h in range(heads):
        k = h // groups
        query = o.queries_pre_rope[h, o.new_positions >= 0].mean(axis=0)
        query = rotate(query, np.array(length - 1), o.rope_frequencies)
        key = keys[k, o.positions[k] >= 0].mean(axis=0)
        logits = [
            rotate(key, np.array(t), o.rope_frequencies) @ query / np.sqrt(head_dim)
            for t in range(length)
        ]
        area[k] += np.cumsum(softmax(np.array(logits))).mean() / groups
    streams = np.argsort(area, kind="stable")[: int(sparsity * kv_heads)]
    scores = o.positions.astype(float)
    for k in streams:
        outside = (o.positions[k] >= sinks) & (o.positions[k] < o.next_position - recent)
        scores[k, outside] = -1.0
    return scores
