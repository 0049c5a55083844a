"""Scores that weigh values, and splits of budgets, for one row in NumPy and float64.

Written from the formulas, with every array they hide spelled out: W_O is applied in full, sets
are sorted, tokens are visited one by one. `o` is `observations.mirror(observation, row)`.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from tests.policies.golden import window_weights


def dense_window(o: SimpleNamespace) -> np.ndarray:
    """Weights [H, Q, S] of the Q queries that exist."""
    per_head = window_weights(o)
    slots = o.keys.shape[1]
    rows = [[[row.get(s, 0.0) for s in range(slots)] for row in head] for head in per_head]
    return np.array(rows).reshape(len(per_head), -1, slots)


def before_window(o: SimpleNamespace, window: int) -> np.ndarray:
    return (o.positions >= 0) & (o.positions < o.next_position - window)


def moving_average(row: np.ndarray, width: int, shift: int) -> np.ndarray:
    """Edges repeated: out[i] = mean of row[i + shift - width // 2 .. i + shift + width // 2]."""
    result = np.zeros(len(row))
    for i in range(len(row)):
        place = np.arange(width) + i + shift - width // 2
        result[i] = row[np.clip(place, 0, len(row) - 1)].mean()
    return result


def zero_padded_pool(row: np.ndarray, width: int, kind: str) -> np.ndarray:
    result = np.zeros(len(row))
    for i in range(len(row)):
        near = row[max(0, i - width // 2) : i + width // 2 + 1]
        result[i] = near.sum() / width if kind == "avg" else near.max()
    return result


def drift_of(weights: np.ndarray, valid: np.ndarray, count: int) -> float:
    """D_front - D_rear of one head: weights [Q, S]."""
    place = np.cumsum(valid) - 1
    means = []
    for row in weights:
        order = [s for s in np.argsort(-row, kind="stable") if row[s] > 0][: max(count, 1)]
        means.append(np.mean(place[order]))
    half = len(means) // 2
    return float(np.mean(means[:half]) - np.mean(means[half:])) if half else 0.0


def width_and_shift(drift: float, beta: float, k_min: int, rule: str) -> tuple[int, int]:
    width = max(k_min, 2 * int(abs(drift) // beta) + 1)
    if rule == "clean":
        return width, int(np.trunc(drift / beta))
    shift = int(np.floor(drift / beta))
    return width, shift if drift > 0 else shift + 1


def ema(rows: np.ndarray, alpha: float) -> np.ndarray:
    mean = rows[0]
    for row in rows[1:]:
        mean = alpha * row + (1 - alpha) * mean
    return mean


def restkv(
    o: SimpleNamespace,
    *,
    budget: int,
    window: int,
    alpha: float = 0.3,
    mode: str = "after",
    granularity: str = "kv",
    reduction: str = "mean",
    use_wo: bool = True,
    tau: float = 1.0,
    beta: float = 2000.0,
    beta_fraction: float | None = None,
    k_min: int = 5,
    rule: str = "clean",
    spatial: str = "adaptive",
) -> np.ndarray:
    weights = dense_window(o)
    heads, slots = weights.shape[0], weights.shape[2]
    groups = heads // len(o.positions)
    entries = before_window(o, window)
    valid = o.positions >= 0
    scores = np.zeros(o.positions.shape)

    def projected(h: int, change: np.ndarray) -> np.ndarray:
        if use_wo:
            return change @ o.output_projection[h]
        own = np.zeros((groups, len(change)))
        own[h % groups] = change
        return own.reshape(-1)

    def one(k: int, members: list[int], attention: np.ndarray, outputs: np.ndarray) -> np.ndarray:
        result = np.zeros(slots)
        for s in np.flatnonzero(valid[k]):
            total, scale = 0.0, 0.0
            for h in members:
                share = attention[h, s] / max(1 - attention[h, s], 1e-6)
                total = total + share * projected(h, outputs[h] - o.values[k, s])
                scale += share
            if scale > 0:
                result[s] = scale * (np.linalg.norm(total) / scale) ** tau
        return result

    for k in range(len(scores)):
        members = list(range(k * groups, (k + 1) * groups))
        together = [members] if granularity == "kv" else [[h] for h in members]
        per_scored = []
        for scored in together:
            clean = np.where(valid[k][:, None], o.values[k], 0.0)
            if weights.shape[1] == 0:
                raw = np.zeros(slots)
            elif mode == "after":
                mean = np.array([ema(weights[h], alpha) for h in range(heads)])
                outputs = np.where(entries[k], mean, 0.0) @ clean
                raw = one(k, scored, mean, outputs)
            else:
                rows = [one(k, scored, rows, rows @ clean) for rows in np.swapaxes(weights, 0, 1)]
                raw = ema(np.array(rows), alpha)
            smooth = raw.copy()
            inside = np.flatnonzero(entries[k])
            if spatial == "adaptive" and len(inside):
                drift = np.mean([drift_of(weights[h], valid[k], budget - window) for h in scored])
                scale = beta if beta_fraction is None else beta_fraction * valid[k].sum()
                smooth[inside] = moving_average(
                    raw[inside], *width_and_shift(drift, scale, k_min, rule)
                )
            elif spatial in ("avg", "max"):
                alone = np.where(entries[k], raw, 0.0)
                smooth[inside] = zero_padded_pool(alone, k_min, spatial)[inside]
            per_scored.append(smooth)
        reduce = np.max if reduction == "max" else np.mean
        scores[k] = reduce(np.array(per_scored), axis=0)
    return scores


def snapkv(o: SimpleNamespace, *, window: int, kernel: int, pooling: str) -> np.ndarray:
    weights = dense_window(o)
    scores = np.zeros(o.positions.shape)
    groups = weights.shape[0] // len(scores)
    for k in range(len(scores)):
        own = weights[k * groups : (k + 1) * groups].reshape(-1, weights.shape[2])
        mean = own.sum(0) / max(len(own), 1)
        entries = before_window(o, window)[k] | (o.positions[k] < 0)
        pooled = zero_padded_pool(np.where(entries, mean, 0.0), kernel, pooling)
        scores[k] = np.where(entries, pooled, mean)
    return scores


def caote(
    o: SimpleNamespace, *, window: int, kernel: int = 5, pooling: str = "avg", fast: bool = False
) -> np.ndarray:
    base = np.where(o.positions >= 0, snapkv(o, window=window, kernel=kernel, pooling=pooling), 0.0)
    scores = np.zeros(o.positions.shape)
    for k in range(len(scores)):
        valid = np.flatnonzero(o.positions[k] >= 0)
        weights = base[k, valid] / (base[k, valid].sum() or 1.0)
        values = o.values[k, valid]
        output = values.mean(0) if fast else weights @ values
        for weight, value, s in zip(weights, values, valid, strict=True):
            odds = weight / max(1 - weight, 1e-6)
            scores[k, s] = odds * np.linalg.norm(output - value)
    return scores


def critical_stages(
    o: SimpleNamespace, base: np.ndarray, *, budget: int, recent: int, fraction: float = 0.5
) -> tuple[list[set[int]], np.ndarray]:
    """Slots of stage 1 for each head, and the stage 2 scores of all."""
    heads = len(o.output_projection)
    groups = heads // len(base)
    first, second = [], np.zeros(base.shape)
    for k in range(len(base)):
        valid = np.flatnonzero(o.positions[k] >= 0)
        newest = set(valid[o.positions[k, valid] >= o.next_position - recent])

        def order(s: int, k: int = k, newest: set = newest) -> tuple:
            return (s in newest, o.positions[k, s] if s in newest else base[k, s], -s)

        ranked = sorted(valid, key=order, reverse=True)
        first.append(set(ranked[: int(fraction * budget)]))
        for s in valid:
            norms = [
                np.abs(o.values[k, s] @ o.output_projection[h]).sum()
                for h in range(k * groups, (k + 1) * groups)
            ]
            second[k, s] = (base[k, s] + 1e-4) * np.mean(norms)
    return first, second


def expected_attention(
    o: SimpleNamespace,
    *,
    horizon: int = 512,
    skipped: int = 4,
    use_covariance: bool = True,
    use_vnorm: bool = True,
    epsilon: float = 0.0,
) -> np.ndarray:
    heads, _, dim = o.queries_pre_rope.shape
    groups = heads // len(o.positions)
    rotation = np.zeros((dim, dim))
    for position in range(o.next_position, o.next_position + horizon):
        for i, frequency in enumerate(o.rope_frequencies):
            angle, pair = position * frequency, i + dim // 2
            rotation[i, i] += np.cos(angle) / horizon
            rotation[pair, pair] += np.cos(angle) / horizon
            rotation[i, pair] -= np.sin(angle) / horizon
            rotation[pair, i] += np.sin(angle) / horizon
    scores = np.zeros(o.positions.shape)
    for k in range(len(scores)):
        seen = np.flatnonzero(o.positions[k] >= skipped)
        valid = np.flatnonzero(o.positions[k] >= 0)
        for h in range(k * groups, (k + 1) * groups):
            queries = o.queries_pre_rope[h][o.new_positions >= skipped]
            mean, spread = np.zeros(dim), np.zeros((dim, dim))
            if len(queries):
                mean = rotation @ queries.mean(0)
                spread = rotation @ np.cov(queries.T, bias=True) @ rotation.T
            keys = o.keys[k, seen]
            logits = keys @ mean / np.sqrt(dim)
            if use_covariance:
                logits = logits + np.einsum("sd,de,se->s", keys, spread, keys) / (2 * dim)
            if len(seen):
                mass = np.exp(logits - logits.max())
                scores[k, seen] += mass / mass.sum() / groups
        scores[k, valid] += epsilon
        if use_vnorm:
            scores[k, valid] *= np.linalg.norm(o.values[k, valid], axis=-1)
    return scores


def cake(o: SimpleNamespace, *, window: int, kernel: int = 5, gamma: float = 200.0) -> np.ndarray:
    weights = dense_window(o)
    queries, slots = weights.shape[1:]
    groups = len(weights) // len(o.positions)
    scores = np.zeros(o.positions.shape)
    for k in range(len(scores)):
        total = np.zeros(slots)
        for h in range(k * groups, (k + 1) * groups):
            if queries:
                variance = weights[h].var(0, ddof=1) if queries > 1 else np.zeros(slots)
                total += (weights[h].mean(0) + gamma * variance) / groups
        entries = before_window(o, window)[k]
        pooled = zero_padded_pool(np.where(entries, total, 0.0), kernel, "avg")
        scores[k] = np.where(entries, pooled, total)
    return scores


def cake_preference(o: SimpleNamespace, *, window: int, tau1: float, tau2: float) -> float:
    weights = dense_window(o)
    groups = len(weights) // len(o.positions)
    entropy, restless = 0.0, 0.0
    for h, rows in enumerate(weights):
        inside = before_window(o, window)[h // groups]
        chosen = rows[:, inside]
        positive = chosen[chosen > 0]
        entropy -= np.sum(positive * np.log(positive))
        if len(rows) > 1:
            restless += chosen.var(0, ddof=1).sum()
    return entropy ** (1 / tau1) * restless ** (1 / tau2)


def largest_remainder(shares: np.ndarray, total: int) -> np.ndarray:
    result = np.floor(shares + 1e-9).astype(int)
    order = np.argsort(-(shares - result), kind="stable")
    result[order[: total - result.sum()]] += 1
    return result


def ada_shares(
    scores: np.ndarray, valid: np.ndarray, protected: np.ndarray, budget: int, floor: float
) -> np.ndarray:
    """Real-valued budgets of the heads of one layer [K, S]."""
    guarded = (protected & valid).sum(1)
    base = budget - guarded
    contested = [
        (-scores[k, s], k, s)
        for k in range(len(scores))
        for s in np.flatnonzero(valid[k] & ~protected[k])
    ]
    won = np.zeros(len(scores))
    for _, k, _ in sorted(contested)[: base.sum()]:
        won[k] += 1
    return guarded + (1 - floor) * won + floor * base


def global_counts(
    scores: np.ndarray, valid: np.ndarray, rank: np.ndarray, total: int, floor: int, ceiling: int
) -> np.ndarray:
    """Budgets [L, K] of one row: heads' safe entries first, then the best of all that is left."""
    entries = sorted(
        (-int(rank[index]), -float(scores[index]), *map(int, index))
        for index in zip(*np.nonzero(valid), strict=True)
    )
    counts = np.zeros(scores.shape[:2], int)
    taken = set()
    held = valid.sum(-1)
    for layer, head in np.ndindex(*counts.shape):
        own = [e for e in entries if e[2:4] == (layer, head)]
        safe = min(max(floor, 1), held[layer, head], ceiling)
        taken.update(own[:safe])
        counts[layer, head] = safe
    for entry in entries:
        if counts.sum() >= total:
            break
        if entry not in taken and counts[entry[2:4]] < ceiling:
            counts[entry[2:4]] += 1
    return counts


def kvzip(
    queries: np.ndarray,
    query_positions: np.ndarray,
    replay_keys: np.ndarray,
    keys: np.ndarray,
    positions: np.ndarray,
    chunk: tuple[int, int],
    first_tokens: int,
) -> np.ndarray:
    """One row: queries [H, R, D], replay keys [K, R, D], keys [K, S, D]."""
    groups = len(queries) // len(keys)
    scores = np.zeros(positions.shape)
    for h, r in np.ndindex(*queries.shape[:2]):
        if query_positions[r] < 0:
            continue
        k = h // groups
        sinks = [s for s, p in enumerate(positions[k]) if 0 <= p < first_tokens]
        own = [s for s, p in enumerate(positions[k]) if p >= 0 and chunk[0] <= p < chunk[1]]
        cached = sorted(set(sinks) | set(own))
        replayed = [i for i, p in enumerate(query_positions) if 0 <= p <= query_positions[r]]
        stack = np.concatenate([keys[k, cached], replay_keys[k, replayed]])
        logits = stack @ queries[h, r] / np.sqrt(queries.shape[-1])
        mass = np.exp(logits - logits.max())
        mass /= mass.sum()
        for s in own:
            scores[k, s] = max(scores[k, s], mass[cached.index(s)])
    return scores


def cache_merging(
    values: np.ndarray, valid: np.ndarray, keep: np.ndarray, scores: np.ndarray, neighbours: int
) -> np.ndarray:
    """One head: values [S, D]."""
    result = values.copy()
    kept = np.flatnonzero(valid & keep)
    mean = scores[kept].mean() if len(kept) else 0.0
    for s in np.flatnonzero(valid & ~keep):
        after = kept[kept > s][:neighbours]
        if len(after) and mean > 0:
            part = min(1.0, max(scores[s] / mean, 0.0)) * values[s] / len(after)
            result[after] += part
    return result


def pivot_merging(
    keys: np.ndarray, values: np.ndarray, valid: np.ndarray, keep: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One head: keys and values [S, D]."""
    kept = np.flatnonzero(valid & keep)
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    groups: dict[int, list[int]] = {int(s): [] for s in kept}
    for s in np.flatnonzero(valid & ~keep):
        groups[int(kept[np.argmax(unit[kept] @ unit[s])])].append(int(s))
    merged = []
    for array in (keys, values):
        result = array.copy()
        for pivot, members in groups.items():
            halves = [(array[s] + array[pivot]) / 2 for s in members]
            result[pivot] = np.mean([array[pivot], *halves], axis=0)
        merged.append(result)
    return merged[0], merged[1]
