"""Retention gates: from a token's hidden state, how fast its entry stops being useful."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvjax.whole import check_whole

type Kind = Literal["rg", "rg10"]
TIED_WIDTH = 64  # features per head under `tie_heads`
# What is kept must not depend on how a device rounds its products.
_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateConfig:
    """The shape of retention gates.

    "rg" is TRIM-KV's gate (arXiv 2512.03324): one hidden layer, everything per layer. "rg10" is
    that of Make Each Token Count (arXiv 2605.09649): a second hidden layer, and a last projection
    that all layers share, which makes their scores comparable; `share_output=False` unties it.
    `tie_heads` goes further: each head reads 64 features of its own with one common vector.
    """

    kind: Kind = "rg10"
    width: int = 512
    share_output: bool = True
    tie_heads: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("rg", "rg10"):
            raise ValueError(f"kind={self.kind!r}: allowed are 'rg' and 'rg10'")
        check_whole("width", self.width, 1)
        if self.kind == "rg" and self.tie_heads:
            raise ValueError("tie_heads=True: allowed with kind 'rg10' only")

    @property
    def shared(self) -> frozenset[str]:
        """Names of the parameters that all layers have in common."""
        return frozenset({"w3", "b3"} if self.kind == "rg10" and self.share_output else ())


type Gates = dict[str, Array]
"""w1 [L, E, F], b1 [L, F]; rg10: w2 [L, F, F] (tied heads: [L, F, 64 K]), b2; w3 [F, K] (tied:
[64]), b3 [K] (tied: []), both with a leading axis L where layers do not share them."""


def initial_bias(length: int) -> float:
    """The output bias with which `length` tokens start out as good as undecayed: ln T + 7.6.

    It makes T (1 - beta) about 5e-4; TRIM-KV's 18 is this at 32K tokens.
    """
    return math.log(length) + 7.6


def init_gates(
    config: GateConfig,
    key: Array,
    *,
    num_layers: int,
    num_kv_heads: int,
    hidden_size: int,
    bias: float,
) -> Gates:
    """Float32 parameters: matrices from N(0, 0.02), hidden biases 0, output bias `bias`."""
    layers, heads, hidden, width = num_layers, num_kv_heads, hidden_size, config.width
    inner = heads * TIED_WIDTH if config.tie_heads else width
    last = TIED_WIDTH if config.tie_heads else inner
    shapes: dict[str, tuple[int, ...]] = {"w1": (layers, hidden, width), "b1": (layers, width)}
    if config.kind == "rg10":
        shapes |= {"w2": (layers, width, inner), "b2": (layers, inner)}
    shapes |= {
        "w3": (last,) if config.tie_heads else (last, heads),
        "b3": () if config.tie_heads else (heads,),
    }
    for name in {"w3", "b3"} - config.shared:
        shapes[name] = (layers, *shapes[name])
    gates = {}
    for index, (name, shape) in enumerate(shapes.items()):
        if name.startswith("w"):
            gates[name] = 0.02 * jax.random.normal(jax.random.fold_in(key, index), shape)
        else:
            gates[name] = jnp.full(shape, bias if name == "b3" else 0.0, jnp.float32)
    return gates


def per_layer(config: GateConfig, gates: Gates, num_layers: int) -> Gates:
    """The gates with a layer axis on every array, as a scan over layers and policies take them."""
    return {
        name: jnp.broadcast_to(array, (num_layers, *array.shape))
        if name in config.shared
        else array
        for name, array in gates.items()
    }


def log_beta(
    gates: Gates, hidden: Float[Array, "B T E"], num_kv_heads: int
) -> Float[Array, "B K T"]:
    """log of each token's retention coefficient in (0, 1), float32, from one layer's gates.

    u = silu(x W1 + b1); rg10: u = silu(u W2 + b2); log sigmoid(u W3 + b3). `hidden` is the
    normalised input of the attention block. Returned in log form: beta itself rounds to 1 where
    it matters most.
    """
    u = hidden.astype(jnp.float32)
    for layer in ("1", "2"):
        if f"w{layer}" in gates:
            u = jax.nn.silu(_matmul(u, gates[f"w{layer}"]) + gates[f"b{layer}"][None, None])
    if gates["w3"].ndim == 1:
        u = u.reshape(*u.shape[:-1], num_kv_heads, TIED_WIDTH)
    y = _matmul(u, gates["w3"])
    y = y + jnp.broadcast_to(gates["b3"], y.shape)
    return jax.nn.log_sigmoid(jnp.swapaxes(y, 1, 2))


def log_utility(
    log_beta: Float[Array, "*n"], age: Float[Array, "*n"], lookahead: int = 1
) -> Float[Array, "*n"]:
    """log of sum_(m=0)^(n-1) beta^(age + m), the uses expected in the next n steps.

    age log beta + log(1 - beta^n) - log(1 - beta), for n = 1 age log beta. Make Each Token
    Count (arXiv 2605.09649), its future utility to a horizon of n.
    """
    if lookahead == 1:
        return age * log_beta
    # expm1 keeps 1 - beta where beta rounds to 1; at log beta = 0 exactly the ratio is n.
    negative = jnp.minimum(log_beta, -jnp.finfo(jnp.float32).tiny)
    ratio = jnp.log(-jnp.expm1(lookahead * negative)) - jnp.log(-jnp.expm1(negative))
    return age * log_beta + ratio
