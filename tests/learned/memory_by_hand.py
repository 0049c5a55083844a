"""Latent memory in NumPy and float64, token by token: what `kvjax.learned.memory` has to equal."""

from __future__ import annotations

import math

import numpy as np

from kvjax.learned.memory import MemoryConfig


def normalised(config: MemoryConfig, x: np.ndarray) -> np.ndarray:
    if not config.normalise:
        return x
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def features(config: MemoryConfig, phi: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """phi of one token's heads [N, D]: [size]."""
    return normalised(config, heads.reshape(-1) @ phi)


def write(config, params, state, keys, values, positions, evicted, num_heads, decays=True):
    """One row's (M, b) after a cut; keys [K, S, D]."""
    m, b = (array.astype(np.float64) for array in state)
    num_kv_heads = keys.shape[0]
    if decays and evicted.any():
        m, b = config.decay * m, config.decay * b
    for position in np.unique(positions[evicted]):
        key, value = np.zeros((2, num_kv_heads, keys.shape[2]))
        for head in range(num_kv_heads):
            for slot in np.flatnonzero((positions[head] == position) & evicted[head]):
                key[head], value[head] = keys[head, slot], values[head, slot]
        if config.phi == "per_head":
            for head in range(num_kv_heads):
                f = normalised(config, key[head] @ params["phi"][head])
                m[head] += config.eta * np.outer(f, value[head])
                b[head] += config.eta * f**2
            continue
        if config.phi == "dense":
            key = np.repeat(key, num_heads // num_kv_heads, axis=0)
        f = features(config, params["phi"], key)
        m += config.eta * np.outer(f, value.reshape(-1))
        b += config.eta * f**2
    return m, b


def read(config, params, state, query):
    """m [H, D] and mass [H] of one token's queries [H, D]."""
    m, b = (array.astype(np.float64) for array in state)
    num_heads, dim = query.shape
    found, mass = np.zeros((num_heads, dim)), np.zeros(num_heads)
    for head in range(num_heads):
        if config.phi == "per_head":
            own = head * m.shape[0] // num_heads
            f = normalised(config, query[head] @ params["phi"][own])
            top, total = f @ m[own], f**2 @ b[own]
        else:
            num_kv_heads = m.shape[1] // dim
            group = num_heads // num_kv_heads
            asked = query
            if config.phi == "compact":
                asked = query.reshape(num_kv_heads, group, dim).mean(axis=1)
            f = features(config, params["phi"], asked)
            own = head // group
            top, total = f @ m[:, own * dim : (own + 1) * dim], f**2 @ b
        if total > 0:
            found[head], mass[head] = top / (total + config.eps), total / f.size
    return found, mass


def gate(params, query):
    """One token's gates before the sigmoid, [1] or [H], from its queries [H, D]."""
    x = query.reshape(-1)
    if "gate_w1" in params:
        x = x @ params["gate_w1"] + params["gate_b1"]
        x = np.array([0.5 * a * (1 + math.erf(a / math.sqrt(2))) for a in x])
    return x @ params["gate_w2"] + params["gate_b2"]


def combine(config, attention, lse, m, mass, logit):
    """One token's attention [H, D] with its memory."""
    out = attention.astype(np.float64).copy()
    for head in range(len(out)):
        if mass[head] == 0:
            continue
        a = logit[head if len(logit) > 1 else 0]
        if config.combine == "lse":  # one more entry of the softmax
            entry = math.exp(a) * mass[head]
            share = entry / (math.exp(lse[head]) + entry)
        else:
            share = 1 / (1 + math.exp(-a))
        if config.combine != "residual":
            out[head] *= 1 - share
        out[head] += share * m[head]
    return out
