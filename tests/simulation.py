"""H2O and TOVA at decode, one token, layer and head at a time with Python lists."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import kvjax

project = jax.jit(lambda layer, x, cos, sin: layer.project(x, cos, sin))
finish = jax.jit(lambda layer, x, out: layer.finish(x, out))


@dataclasses.dataclass
class Entry:
    """One cached token of one KV head."""

    position: int
    key: np.ndarray
    value: np.ndarray
    mass: float = 0.0  # attention received so far
    newest: float = 0.0  # attention received from the newest query


class Simulation:
    """One row. A model without sliding windows; `method` is "h2o" or "tova"."""

    def __init__(self, model: kvjax.Decoder, method: str, budget: int, interval: int) -> None:
        self.model, self.method = model, method
        self.budget, self.interval = budget, interval
        count = model.config.num_layers
        self.layers = [jax.tree.map(lambda a, i=i: a[i], model.layers) for i in range(count)]
        heads = model.config.num_kv_heads
        self.entries: list[list[list[Entry]]] = [[[] for _ in range(heads)] for _ in self.layers]
        self.seen = 0

    def positions(self) -> list[list[list[int]]]:
        """What every head of every layer holds."""
        return [[[e.position for e in head] for head in layer] for layer in self.entries]

    def prompt(self, tokens: np.ndarray) -> np.ndarray:
        """Reads a prompt token by token without evicting, then cuts; logits of its last token."""
        for token in tokens:
            logits = self._read(int(token))
        self._cut()
        return logits

    def step(self, token: int) -> np.ndarray:
        """Decodes one token, then cuts where the heads have grown by the interval."""
        logits = self._read(token)
        if len(self.entries[0][0]) >= self.budget + self.interval:
            self._cut()
        return logits

    def _read(self, token: int) -> np.ndarray:
        config = self.model.config
        group = config.num_heads // config.num_kv_heads
        cos, sin = self.model.rotation(jnp.full((1, 1), self.seen))
        x = self.model.embed(jnp.full((1, 1), token))
        for layer, heads in zip(self.layers, self.entries, strict=True):
            new = project(layer, x, cos, sin)
            queries, keys, values = (
                np.asarray(a, np.float64)[0, :, 0] for a in (new.queries, new.keys, new.values)
            )
            out = np.zeros((config.num_heads, config.head_dim))
            for index, head in enumerate(heads):
                head.append(Entry(self.seen, keys[index], values[index]))
                for entry in head:
                    entry.newest = 0.0
                for query in range(index * group, (index + 1) * group):
                    logits = np.array([e.key @ queries[query] for e in head])
                    weights = np.exp((logits - logits.max()) / np.sqrt(config.head_dim))
                    weights /= weights.sum()
                    out[query] = weights @ np.stack([e.value for e in head])
                    for entry, weight in zip(head, weights, strict=True):
                        entry.mass += weight / group
                        entry.newest += weight
            x = finish(layer, x, jnp.asarray(out, jnp.float32)[None, :, None])
        self.seen += 1
        return np.asarray(self.model.logits(x)[0, 0])

    def _cut(self) -> None:
        recent = self.budget // 2 if self.method == "h2o" else 0
        for heads in self.entries:
            everywhere: dict[int, float] = {}  # TOVA shares one score over all heads of a layer
            for head in heads:
                for entry in head:
                    everywhere[entry.position] = everywhere.get(entry.position, 0) + entry.newest
            for index, head in enumerate(heads):

                def order(entry: Entry, everywhere=everywhere) -> tuple[int, float, int]:
                    if entry.position >= self.seen - recent:
                        return (-entry.position, 0.0, 0)
                    score = entry.mass if self.method == "h2o" else everywhere[entry.position]
                    return (1, -score, entry.position)

                best = sorted(head, key=order)[: self.budget]
                heads[index] = sorted(best, key=lambda entry: entry.position)
