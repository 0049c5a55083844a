"""What a method of erasing is: a cache in, a cache out, in static shapes."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

from jaxtyping import Array, Int

from kvjax.cache import Cache
from kvjax.erasing.spans import Extent
from kvjax.models.decoder import Adapters, Decoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edit:
    """What is edited, and where.

    `tokens` are those of all positions the cache has seen. `spans` are (start, stop) in positions,
    ascending and disjoint in each row; (0, 0) is none. `extent` bounds them. `adapters` are an
    eraser's, for the methods that need one.
    """

    model: Decoder
    cache: Cache
    tokens: Int[Array, "B T"]
    spans: Int[Array, "B N 2"]
    extent: Extent
    adapters: Adapters | None = None


class Method(abc.ABC):
    """A frozen dataclass of settings, static under jit."""

    name: ClassVar[str]
    needs_eraser: ClassVar[bool] = False
    moves: ClassVar[bool] = False  # what stands behind a span moves up, so that positions close

    @abc.abstractmethod
    def apply(self, edit: Edit) -> Cache:
        """The cache after the edit."""

    def check(self, model: Decoder) -> None:
        """Refuses settings that this model does not allow."""
        del model


def refuse_layer(name: str, layer: int, model: Decoder) -> None:
    """Refuses a layer that the model does not have."""
    if not 0 <= layer < model.config.num_layers:
        allowed = f"0 to {model.config.num_layers - 1}"
        raise ValueError(f"method {name!r}, check_layer={layer}: allowed are {allowed}")
