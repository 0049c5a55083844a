"""Keys and values of a whole text in plain NumPy, float64: who sees whom is a matrix.

Some tokens may keep given states, as in a cache, and some may run through adapted weights. Shares
nothing with the library but the parameters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvjax.models import rope

NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class States(NamedTuple):
    keys: np.ndarray  # [L, K, T, D], after RoPE
    values: np.ndarray  # [L, K, T, D]
    attention: np.ndarray  # [L, H, T, T]
    logits: np.ndarray  # [T, V]


def causal(model: Any, length: int) -> np.ndarray:
    """[L, K, T, T]: ordinary decoding with each layer's sliding window."""
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    masks = [(distance >= 0) & (distance < window) for window in model.windows]
    return np.repeat(np.stack(masks)[:, None], model.config.num_kv_heads, axis=1)


def rotate(x: np.ndarray, positions: np.ndarray, model: Any) -> np.ndarray:
    """x [.., T, D] turned by `positions` [T]; the pairs are (i, i + D/2)."""
    frequencies, _ = rope.rope_frequencies(model.config)
    pairs = x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :]
    turned = pairs * np.exp(1j * positions[:, None] * frequencies.astype(np.float64))
    return np.concatenate([turned.real, turned.imag], axis=-1)


def states(
    model: Any,
    tokens: np.ndarray,
    *,
    visible: np.ndarray | None = None,
    kept: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    eraser: Any = None,
    adapted: np.ndarray | None = None,
) -> States:
    """The states of `tokens` [T].

    `visible` [L, K, T, T], default causal. `kept` are keys, values [L, K, T, D] and a mask [L, T]
    of where they hold instead of computed ones. `adapted` [T] marks tokens that run through W +
    alpha / rank A B.
    """
    config, length = model.config, len(tokens)
    parameters = {name: np.asarray(a, np.float64) for name, a in model.parameters.items()}
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    visible = causal(model, length) if visible is None else visible
    adapted = np.zeros(length, bool) if adapted is None else adapted
    positions = np.arange(length)
    _, factor = rope.rope_frequencies(config)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_eps) * weight

    x = parameters["embedding"][tokens]
    found: list[list[np.ndarray]] = [[], [], []]
    for layer in range(config.num_layers):
        weights = {
            name.removeprefix("layers."): array[layer]
            for name, array in parameters.items()
            if name.startswith("layers.")
        }

        def linear(x: np.ndarray, name: str, w: dict = weights, layer: int = layer) -> np.ndarray:
            bias = w.get(name.replace("proj", "bias"), 0.0)
            plain = x @ w[name] + bias
            if eraser is None or f"{name}.a" not in eraser.arrays:
                return plain
            a, b = (np.asarray(eraser.arrays[f"{name}.{part}"][layer]) for part in "ab")
            merged = w[name] + eraser.config.alpha / eraser.config.rank * (a @ b)
            return np.where(adapted[:, None], x @ merged + bias, plain)

        def split(x: np.ndarray) -> np.ndarray:
            return x.reshape(length, -1, size).transpose(1, 0, 2)

        hidden = norm(x, weights["attention_norm"])
        queries, keys, values = (split(linear(hidden, name)) for name in NAMES[:3])
        if config.qk_norm:
            queries, keys = norm(queries, weights["q_norm"]), norm(keys, weights["k_norm"])
        queries, keys = (factor * rotate(a, positions, model) for a in (queries, keys))
        if kept is not None:
            given = kept[2][layer][None, :, None]
            keys = np.where(given, kept[0][layer], keys)
            values = np.where(given, kept[1][layer], values)
        group = heads // kv_heads
        logits = np.einsum("hqd,hsd->hqs", queries, np.repeat(keys, group, axis=0)) / size**0.5
        logits = np.where(np.repeat(visible[layer], group, axis=0), logits, -np.inf)
        weight = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weight /= weight.sum(axis=-1, keepdims=True)
        out = np.einsum("hqs,hsd->hqd", weight, np.repeat(values, group, axis=0))
        x = x + linear(out.transpose(1, 0, 2).reshape(length, -1), "o_proj")
        hidden = norm(x, weights["mlp_norm"])
        gate = linear(hidden, "gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(hidden, "up_proj"), "down_proj")
        for into, array in zip(found, (keys, values, weight), strict=True):
            into.append(array)
    head = parameters["embedding"].T if config.tie_embeddings else parameters["lm_head"]
    last = norm(x, parameters["norm"]) @ head
    return States(*(np.stack(arrays) for arrays in found), last)
