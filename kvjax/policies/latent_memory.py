"""Evicted entries that live on in a latent memory (IndexMem), under any scorer."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.learned import memory as latent
from kvjax.learned.indexer import Activation
from kvjax.learned.memory import MemoryConfig
from kvjax.learned.modules import config_of, read_card
from kvjax.policies.base import Params, Policy, Remainder, StateField
from kvjax.policies.indexmem import indexmem_no_memory
from kvjax.policies.observation import MEMORY, NEWEST
from kvjax.policies.registry import register
from kvjax.policies.retention import retention_global
from kvjax.policies.rope import rotate
from kvjax.policies.snapkv import SnapKV

# Of the policies that have a memory by name: as many features as the paper's, `MemoryConfig()`, and
# a third of its bytes; it gives back up to four times as much (docs/results/memory_variants.md).
PER_HEAD = MemoryConfig(phi="per_head", combine="lse", gate="per_head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentMemory(Remainder):
    """Writes evicted entries into a matrix per layer that later tokens read beside attention.

    The equations are in `kvjax.learned.memory`. A whole prefill writes at its cut and does not
    read; chunks, questions and generated tokens read what was there before their own call.

    Paper: IndexMem (arXiv 2605.25475). Defaults: those of `MemoryConfig`. The trained arrays are
    those in the directory `path`, else the module that ships for the policy and the backbone.
    """

    remembers: ClassVar[bool] = True
    config: MemoryConfig = MemoryConfig()
    path: str | None = None

    @classmethod
    def trained(cls, path: str) -> LatentMemory:
        """With the settings of the module in the directory `path`.

        Raises:
          FileNotFoundError: no module there.
          ValueError: a module of another kind, or with settings that are none.
        """
        card = read_card(path)
        if card.kind != "memory":
            raise ValueError(f"{path}: a module of kind {card.kind!r}; needed is 'memory'")
        return cls(config=config_of(card, MemoryConfig, path), path=str(path))

    def layer_fields(
        self, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> dict[str, StateField]:
        shapes = self.config.state_shapes(num_heads, num_kv_heads, head_dim)
        fields = {MEMORY + name: StateField(shape=shape) for name, shape in shapes.items()}
        return fields | {NEWEST: StateField(dtype=jnp.int32, fill=-1)}

    def check_params(
        self, params: Params, *, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        latent.check_parameters(
            self.config,
            params,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )

    def write(
        self,
        params: Params,
        memory: dict[str, Array],
        keys: Float[Array, "B K S D"],
        values: Float[Array, "B K S D"],
        positions: Int[Array, "B K S"],
        evicted: Bool[Array, "B K S"],
        rope_frequencies: Float[Array, " D/2"],
        *,
        aligned: bool,
        decays: bool,
    ) -> dict[str, Array]:
        if self.config.coordinates == "pre_rope":
            keys = rotate(keys, positions, rope_frequencies, inverse=True)
        state = latent.write(
            self.config,
            params,
            _written(memory),
            keys,
            values,
            positions,
            evicted,
            aligned=aligned,
            decays=decays,
        )
        newest = jnp.max(jnp.where(evicted, positions, -1), axis=(1, 2))
        named = {MEMORY + name: array for name, array in state.items()}
        return named | {NEWEST: jnp.maximum(memory[NEWEST], newest)}

    def read(
        self,
        params: Params,
        memory: dict[str, Array],
        queries: Float[Array, "B H T D"],
        queries_pre_rope: Float[Array, "B H T D"],
        attention: Float[Array, "B H T D"],
        lse: Float[Array, "B H T"],
    ) -> Float[Array, "B H T D"]:
        recalled = self.recall(params, memory, queries, queries_pre_rope)
        return latent.combine(self.config, attention, lse, *recalled)

    def recall(
        self,
        params: Params,
        memory: dict[str, Array],
        queries: Float[Array, "B H T D"],
        queries_pre_rope: Float[Array, "B H T D"],
    ) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T"], Float[Array, "B N T"]]:
        """m of every query, its mass, and the gate before its sigmoid."""
        asked = queries_pre_rope if self.config.coordinates == "pre_rope" else queries
        m, mass = latent.read(self.config, params, _written(memory), asked)
        return m, mass, latent.gate(params, asked)


def _written(memory: dict[str, Array]) -> latent.Written:
    return {name.removeprefix(MEMORY): a for name, a in memory.items() if name != NEWEST}


@register("snapkv+memory")
def snapkv_memory(window: int = 32, kernel: int = 5) -> Policy:
    """SnapKV whose evicted entries go into a latent memory (`LatentMemory`).

    Paper: IndexMem (arXiv 2605.25475), its ablation over selectors. Defaults: SnapKV's, and a
    memory per head (`PER_HEAD`); the paper's is `LatentMemory()`.
    """
    scorer = SnapKV(window=window, kernel=kernel)
    return Policy(
        name="snapkv+memory",
        scorer=scorer,
        protection=scorer.protection(),
        remainder=LatentMemory(config=PER_HEAD),
    )


@register("indexmem")
def indexmem(
    path: str | None = None,
    size: int | None = None,
    activation: Activation = "relu",
    near: int = 8,
    stride: int = 1,
) -> Policy:
    """IndexMem: its learned indexer chooses, and a latent memory stands in for what is evicted.

    Paper: IndexMem (arXiv 2605.25475); `indexmem-no-memory` with a `LatentMemory`. Defaults: the
    indexer's, and a memory per head (`PER_HEAD`); the paper's is `LatentMemory()`.
    """
    policy = indexmem_no_memory(
        path=path, size=size, activation=activation, near=near, stride=stride
    )
    return dataclasses.replace(policy, name="indexmem", remainder=LatentMemory(config=PER_HEAD))


@register("retention-global+memory")
def retention_global_memory(
    path: str | None = None,
    lookahead: int = 1,
    floor: int | float = 0,
    ceiling: float | None = 4.0,
) -> Policy:
    """Global retention whose evicted entries go into a latent memory (`LatentMemory`).

    Papers: Make Each Token Count (arXiv 2605.09649), IndexMem (arXiv 2605.25475). Defaults:
    those of "retention-global", and a memory per head (`PER_HEAD`); the paper's is
    `LatentMemory()`.
    """
    policy = retention_global(path=path, lookahead=lookahead, floor=floor, ceiling=ceiling)
    return dataclasses.replace(
        policy, name="retention-global+memory", remainder=LatentMemory(config=PER_HEAD)
    )
