"""The cheap baseline in text: a line behind the context that says what to ignore."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax import decoding
from kvjax.cache import Cache
from kvjax.erasing.method import Edit, Method


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptNote(Method):
    """Appends a note, such as "Ignore the passage about ...", to the unedited cache.

    `note` holds its token ids. The cache needs room for them.
    """

    name: ClassVar[str] = "note"

    note: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.note:
            raise ValueError(f"method {self.name!r}, note=(): allowed are token ids, at least one")

    def apply(self, edit: Edit) -> Cache:
        note = jnp.asarray(self.note, jnp.int32)[None]
        cache = edit.cache
        rows = jnp.broadcast_to(note, (cache.batch, len(self.note)))
        lengths = jnp.full(cache.batch, len(self.note), jnp.int32)
        return decoding.extend(edit.model, cache, rows, lengths)[1]
