"""What the training loop asks of a side module: parameters, a loss, and how it is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxtyping import Array, Float

from kvjax.models.decoder import Decoder

type Params = dict[str, Array]
type Batch = Mapping[str, Array]
"""tokens, segments, positions int32 [B, T]; labels bool [B, T]: see `train.data`."""


class Recipe(Protocol):
    """A trainable module beside a frozen backbone."""

    def init(self, model: Decoder, key: Array) -> Params:
        """Float32 parameters to start from."""

    def axes(self, params: Params) -> dict[str, tuple[str | None, ...]]:
        """The logical axes of every parameter: names of `ShardingRules`, or None."""

    def fixed(self, model: Decoder) -> Any:
        """Other arrays that the loss reads and no step changes; None for none."""

    def loss(
        self, params: Params, model: Decoder, batch: Batch, key: Array, fixed: Any
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """The loss of one batch, and what to report of it by name: numbers, or one per layer.

        A pure function, jitted by the loop; `fixed` is what the method of that name gave.
        """

    def export(
        self, params: Params, model: Decoder, directory: Path, training: Mapping[str, Any]
    ) -> None:
        """Writes the module as `kvjax.load_policy` reads it."""
