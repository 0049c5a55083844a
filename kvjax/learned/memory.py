"""Latent memory: evicted entries live on in one small matrix per layer, read beside attention.

With E the tokens that one cut evicts, phi a linear map (RMS-normalised) shared by keys and queries,

    write    M <- decay M + eta sum over i in E of phi(k_i) v_i^T
             b <- decay b + eta sum over i in E of phi(k_i) * phi(k_i)
    read     m(q) = phi(q)^T M / ((phi(q) * phi(q))^T b + eps)
    combine  o = o_attn + g(q) m(q),  g in [0, 1]

M and b are fast weights: they start at 0 with every sequence and change without gradients. phi and
the gate g are trained. Paper: IndexMem (arXiv 2605.25475), whose code is not public; what it leaves
open is an option of `MemoryConfig`. All arithmetic is float32.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from kernels_pallas.latent_memory import memory_read, memory_update
from kvjax.whole import check_whole

type Phi = Literal["compact", "dense", "per_head"]
type Combine = Literal["residual", "convex", "lse"]
type Coordinates = Literal["pre_rope", "post_rope"]
type Gate = Literal["mlp", "linear", "per_head"]

GATE_WIDTH = 64
_CHOICES = {
    "phi": ("compact", "dense", "per_head"),
    "combine": ("residual", "convex", "lse"),
    "coordinates": ("pre_rope", "post_rope"),
    "gate": ("mlp", "linear", "per_head"),
}
_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The shape of a latent memory and what the paper leaves open; static and hashable.

    size: features; None is (H D) // 8, the paper's d_model / 8.
    phi: "compact" maps the keys of a token's KV heads, concatenated, and the mean query of each
      GQA group (K D x size weights, which gives the paper's parameter count); "dense" all H
      queries, and keys repeated over their group; "per_head" has a map D -> size / K and a matrix
      of its own for every KV head, read by each query head with its own query.
    combine: "residual" is the paper's. "convex" is (1 - g) o_attn + g m. Under "lse" the memory is
      one more entry of the softmax, of log mass a(q) + ln((phi(q) * phi(q))^T b / size), with a
      the gate before its sigmoid: o = (1 - w) o_attn + w m for its share w.
    gate: "mlp" H D -> 64 -> 1 (GELU), one scalar per token; "linear" H D -> 1; "per_head" as
      "mlp" with a scalar for every query head. It reads the queries that phi reads.
    coordinates: of the queries and keys that phi sees.
    normalise: phi(x) / sqrt(mean of phi(x)^2 + 1e-6), without a scale of its own.
    decay, eta: as above; a row decays with every cut that takes something from it.
    """

    size: int | None = None
    phi: Phi = "compact"
    combine: Combine = "residual"
    gate: Gate = "mlp"
    coordinates: Coordinates = "pre_rope"
    normalise: bool = True
    decay: float = 0.9
    eta: float = 1.0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: allowed are {', '.join(map(repr, allowed))}"
                )
        if self.size is not None:
            check_whole("size", self.size, 1)
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay}: allowed are numbers in (0, 1]")
        if not self.eta > 0 or not self.eps >= 0:
            raise ValueError(f"eta={self.eta}, eps={self.eps}: allowed are eta > 0 and eps >= 0")

    def features(self, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
        """Components of phi, in all KV heads together."""
        size = max(1, num_heads * head_dim // 8) if self.size is None else self.size
        if self.phi == "per_head" and size % num_kv_heads:
            raise ValueError(
                f"size={size} with phi='per_head': allowed are multiples of the {num_kv_heads} "
                "KV heads"
            )
        return size

    def shapes(self, num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, tuple]:
        """Shapes of one layer's parameters."""
        size = self.features(num_heads, num_kv_heads, head_dim)
        wide, compact = num_heads * head_dim, num_kv_heads * head_dim
        phi = {
            "compact": (compact, size),
            "dense": (wide, size),
            "per_head": (num_kv_heads, head_dim, size // num_kv_heads),
        }
        outputs = num_heads if self.gate == "per_head" else 1
        hidden = {} if self.gate == "linear" else {
            "gate_w1": (wide, GATE_WIDTH),
            "gate_b1": (GATE_WIDTH,),
        }  # fmt: skip
        last = wide if self.gate == "linear" else GATE_WIDTH
        return {
            "phi": phi[self.phi],
            **hidden,
            "gate_w2": (last, outputs),
            "gate_b2": (outputs,),
        }

    def state_shapes(self, num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, tuple]:
        """Shapes of one layer's M ("values") and b ("squares"), per row."""
        size = self.features(num_heads, num_kv_heads, head_dim)
        if self.phi == "per_head":
            own = (num_kv_heads, size // num_kv_heads)
            return {"values": (*own, head_dim), "squares": own}
        return {"values": (size, num_kv_heads * head_dim), "squares": (size,)}


type Parameters = dict[str, Array]
"""phi [L, K D, size] (dense: [L, H D, size]; per_head: [L, K, D, size / K]); gate_w1 [L, H D, 64],
gate_b1 [L, 64] (not linear), gate_w2 [L, 64, 1] (linear: [L, H D, 1]; per_head: [L, 64, H]),
gate_b2 [L, 1] (per_head: [L, H]). Functions of one layer take them without L."""

type Written = dict[str, Array]
"""One layer's state: values [B, size, K D], squares [B, size]; per_head: [B, K, size / K, D] and
[B, K, size / K]. Values are per KV head; query heads of a group read the same ones."""


def init_memory(
    config: MemoryConfig,
    key: Array,
    *,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> Parameters:
    """Float32 parameters: phi and the gate's first layer from N(0, 1 / fan in), biases 0.

    The gate's last layer starts at weights 0 and bias -2, so that g = 0.12 for every query. Under
    "lse" its bias is -8: it is weighed against the log mass of all kept entries, and at -2 the
    memory would take most of the attention before it has learned anything.
    """
    arrays = {}
    shapes = config.shapes(num_heads, num_kv_heads, head_dim)
    for index, (name, shape) in enumerate(shapes.items()):
        if name in ("phi", "gate_w1"):
            drawn = jax.random.normal(jax.random.fold_in(key, index), (num_layers, *shape))
            arrays[name] = drawn / math.sqrt(shape[-2])
        else:
            closed = -8.0 if config.combine == "lse" else -2.0
            fill = closed if name == "gate_b2" else 0.0
            arrays[name] = jnp.full((num_layers, *shape), fill, jnp.float32)
    return arrays


def check_parameters(
    config: MemoryConfig,
    params: object,
    *,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """Refuses arrays that are not this memory's for a model of these sizes.

    Raises:
      ValueError: missing or unknown names, or another shape.
    """
    shapes = config.shapes(num_heads, num_kv_heads, head_dim)
    wanted = {name: (num_layers, *shape) for name, shape in shapes.items()}
    found = {}
    if isinstance(params, dict):
        found = {name: tuple(getattr(array, "shape", ())) for name, array in params.items()}
    if found != wanted:
        raise ValueError(
            f"memory parameters: given are {_listed(found)}; this memory and model need "
            f"{_listed(wanted)}"
        )


def write(
    config: MemoryConfig,
    params: Parameters,
    state: Written,
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    positions: Int[Array, "B K S"],
    evicted: Bool[Array, "B K S"],
    *,
    aligned: bool = False,
    decays: bool = True,
) -> Written:
    """One layer's state after a cut; keys in the config's coordinates.

    An entry is one head's part of a token, and heads may evict different tokens. A token's key is
    the concatenation over heads, with 0 for a head that does not evict the token in this cut, and
    so is its value: where all heads evict the same tokens this is the paper's equation. The parts
    of a token find each other by position, because after a first cut its slots differ from head to
    head; with `aligned` slots are tokens and nothing is sought. Parts evicted by different cuts
    are tokens of their own, also without normalisation, since phi(k) v^T is not linear in (k, v).
    phi "per_head" keeps heads apart anyway.

    `decays` False continues the cut before. Entries not evicted may hold anything.
    """
    weights = params["phi"]
    if config.phi != "per_head":
        weights = _key_weights(config, weights, *keys.shape[1::2])
    left = jnp.ones(keys.shape[:1], jnp.float32)
    if decays:
        left = jnp.where(jnp.any(evicted, axis=(1, 2)), jnp.float32(config.decay), left)
    into = (state["values"], state["squares"])
    new_values, squares = memory_update(
        weights, *into, keys, values, positions, evicted, left,
        eta=config.eta, normalise=config.normalise, aligned=aligned,
    )  # fmt: skip
    return {"values": new_values, "squares": squares}


def read(
    config: MemoryConfig, params: Parameters, state: Written, queries: Float[Array, "B H T D"]
) -> tuple[Float32[Array, "B H T D"], Float32[Array, "B H T"]]:
    """m of every query, exactly 0 from an empty memory, and its mass (phi * phi)^T b / size.

    Queries in the config's coordinates. With normalised phi the mass is about the (decayed)
    number of written tokens; 0 says that the memory is empty.
    """
    weights = params["phi"]
    if config.phi != "per_head":
        weights = weights.reshape(-1, queries.shape[-1], weights.shape[-1])
    held = (state["values"], state["squares"])
    return memory_read(weights, *held, queries, eps=config.eps, normalise=config.normalise)


def gate(params: Parameters, queries: Float[Array, "B H T D"]) -> Float32[Array, "B N T"]:
    """The gate before its sigmoid, for all heads (N = 1) or for each (N = H)."""
    batch, _, tokens, _ = queries.shape
    x = jnp.swapaxes(queries, 1, 2).reshape(batch, tokens, -1).astype(jnp.float32)
    if "gate_w1" in params:
        x = _einsum("btf,fo->bto", x, params["gate_w1"]) + params["gate_b1"][None, None]
        x = jax.nn.gelu(x, approximate=False)
    y = _einsum("btf,fo->bto", x, params["gate_w2"]) + params["gate_b2"][None, None]
    return jnp.swapaxes(y, 1, 2)


def combine(
    config: MemoryConfig,
    attention: Float[Array, "B H T D"],
    lse: Float[Array, "B H T"],
    m: Float32[Array, "B H T D"],
    mass: Float32[Array, "B H T"],
    gate: Float32[Array, "B N T"],
) -> Float[Array, "B H T D"]:
    """What attention over the kept entries becomes, in its dtype; unchanged by an empty memory.

    `lse` is the log-sum-exp of attention's scaled logits, `gate` is before its sigmoid.
    """
    weight = share(config, lse, mass, gate)[..., None]
    kept = attention.astype(jnp.float32)
    if config.combine != "residual":
        kept = (1.0 - weight) * kept
    return (kept + weight * m).astype(attention.dtype)


def share(
    config: MemoryConfig,
    lse: Float[Array, "B H T"],
    mass: Float32[Array, "B H T"],
    gate: Float32[Array, "B N T"],
) -> Float32[Array, "B H T"]:
    """What m is weighted with in `combine`: g, or w under "lse"; 0 for an empty memory."""
    logit, filled = jnp.broadcast_to(gate, mass.shape), mass > 0
    if config.combine == "lse":
        # Rows of padding attend to nothing; their log-sum-exp is -inf.
        logit = logit + jnp.log(jnp.where(filled, mass, 1.0)) - jnp.maximum(lse, -1e30)
    return jnp.where(filled, jax.nn.sigmoid(logit), 0.0)


def _key_weights(
    config: MemoryConfig, phi: Float[Array, "F M"], num_kv_heads: int, head_dim: int
) -> Float[Array, "K D M"]:
    """phi as keys meet it: to repeat a key over its group is to sum the group's weights."""
    if config.phi == "compact":
        return phi.reshape(num_kv_heads, head_dim, -1)
    return jnp.sum(phi.reshape(num_kv_heads, -1, head_dim, phi.shape[-1]), axis=1)


def _listed(shapes: dict[str, tuple]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items())) or "none"
