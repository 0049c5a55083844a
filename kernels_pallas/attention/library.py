"""Maintained kernels for attention within a prompt: splash on TPU, cuDNN on GPU.

Each gives the output and the log-sum-exp, and raises NotImplementedError with one sentence where
it does not serve. With `causal` False every query sees every key, as one part of a prompt sees an
earlier one.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.attention.blocks import pad_to
from kernels_pallas.partition import partitioned

KERNELS = {"tpu": "splash", "gpu": "cudnn"}  # the one of each platform, by its function's name

_LANES = 128
_AXES = "B H T D, B K T D, B K T D -> B H T D, B H T"


@partitioned(_AXES)
def splash(
    queries: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    *,
    causal: bool = True,
    interpret: bool = False,
) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T"]]:
    """Attention by JAX's splash attention for TPU: output and log-sum-exp.

    Causal, padding at the end of a row is seen by padding only, so lengths do not enter.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    batch, heads, length, size = queries.shape
    if not causal and length % _LANES:
        raise NotImplementedError(
            f"splash attention that is not causal takes multiples of {_LANES} tokens, not {length}"
        )
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    queries = pad_to(queries * jnp.asarray(size**-0.5, queries.dtype), _LANES, 2)
    keys, values = pad_to(keys, _LANES, 2), pad_to(values, _LANES, 2)
    padded = queries.shape[2]
    kind = splash_attention_mask.CausalMask if causal else splash_attention_mask.FullMask
    mask = splash_attention_mask.MultiHeadMask([kind((padded, padded))] * group)
    # The kernel's default block of 128 is its smallest; larger ones keep the matrix unit busy.
    block = next(b for b in (1024, 512, 256, _LANES) if padded % b == 0)
    kernel = splash_attention_kernel.make_splash_mqa_single_device(
        mask,
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=min(block, 512)
        ),
        save_residuals=True,
        interpret=interpret,
    )
    grouped = queries.reshape(batch, kv_heads, group, padded, size)
    out, (lse,) = jax.vmap(jax.vmap(kernel))(grouped, keys, values)
    out = out.reshape(batch, heads, padded, size)[:, :, :length]
    return out.astype(queries.dtype), lse.reshape(batch, heads, padded)[:, :, :length]


@partitioned(_AXES)
def cudnn(
    queries: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    *,
    causal: bool = True,
) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T"]]:
    """Attention by cuDNN's flash attention: output and log-sum-exp."""
    if queries.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"cuDNN attention takes bfloat16 and float16, not {queries.dtype}"
        )
    if queries.shape[-1] > 256 or queries.shape[-1] % 8:
        raise NotImplementedError(
            f"cuDNN attention takes head sizes that are multiples of 8 up to 256, not "
            f"{queries.shape[-1]}"
        )

    def tokens_first(array: Array) -> Array:
        return jnp.swapaxes(array, 1, 2)

    try:
        out, lse = jax.nn.dot_product_attention(
            tokens_first(queries),
            tokens_first(keys),
            tokens_first(values),
            is_causal=causal,
            implementation="cudnn",
            return_residual=True,
        )
    except RuntimeError as error:  # raised while tracing where no cuDNN is installed
        raise NotImplementedError(f"cuDNN attention: {error}") from error
    return tokens_first(out), tokens_first(lse).astype(jnp.float32)


def named(kernel: str) -> Callable[..., tuple[Array, Array]]:
    """`splash` or `cudnn`."""
    return {"splash": splash, "cudnn": cudnn}[kernel]
