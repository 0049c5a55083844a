"""KVEraser: learned steering states in the slots of the span (arXiv 2606.17034)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from kvjax.cache import Cache, edits
from kvjax.erasing.method import Edit, Method
from kvjax.erasing.reencoding import reencode
from kvjax.erasing.spans import run, tokens_at


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVEraser(Method):
    """Overwrites the span's K and V with those of an adapted pass over prefix and span.

    KV_steer = E(KV_prefix, span): the backbone with LoRA adapters re-encodes the span's tokens at
    their positions, attending to the cached prefix and to each other. Its keys and values replace
    the span's in every layer; prefix and suffix are untouched, and nothing moves. The cost does
    not depend on what stands behind the span. Several spans are edited from left to right, each
    over the prefix as edited so far. The paper's mechanism is inferred from its abstract and
    released adapter, as its text was not readable.
    """

    name: ClassVar[str] = "kveraser"
    needs_eraser: ClassVar[bool] = True

    def apply(self, edit: Edit) -> Cache:
        def steer(cache: Cache, span: Int[Array, "B 2"]) -> tuple[Cache, None]:
            positions = run(span[:, 0], span[:, 1], edit.extent.span)
            states = reencode(
                edit.model, cache, tokens_at(edit.tokens, positions), positions,
                reads=edit.extent.prefix, adapters=edit.adapters,
            )  # fmt: skip
            return edits.overwrite(cache, *states, positions), None

        return lax.scan(steer, edit.cache, jnp.swapaxes(edit.spans, 0, 1))[0]
