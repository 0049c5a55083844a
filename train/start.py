"""Where a training goes on from: an exported module of the same kind, shape and backbone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvjax.learned import modules
from kvjax.models.decoder import Decoder
from train.recipe import Params


def started(
    start: str | None,
    kind: str,
    options: Mapping[str, Any],
    fresh: Params,
    read: Callable[[str], Params] = modules.read_arrays,
) -> Params:
    """The arrays of the module in the directory `start`; `fresh` where there is none.

    Raises:
      ValueError: a module of another kind, of other options, or of other shapes than `fresh`.
    """
    if start is None:
        return fresh
    card = modules.read_card(start)
    found_options = _plain(card.options)
    if card.kind != kind or found_options != _plain(options):
        raise ValueError(
            f"module.start={start!r}: holds {card.kind} {found_options}; allowed is {kind} of "
            f"this config's, {_plain(options)}"
        )
    found = read(start)
    shapes = {name: array.shape for name, array in found.items()}
    if shapes != {name: array.shape for name, array in fresh.items()}:
        raise ValueError(f"module.start={start!r}: of another backbone, {shapes}")
    return found


def check_backbone(start: str | None, model: Decoder) -> None:
    """Refuses a module of another backbone than `model`, whatever its shapes; not under jit."""
    if start is not None:
        modules.read_card(start).check_backbone(model.fingerprint(), Path(start))


def with_stages(start: str | None, training: Mapping[str, Any]) -> dict[str, Any]:
    """What a card says of the training, the stage before included."""
    if start is None:
        return dict(training)
    return {**training, "before": dict(modules.read_card(start).training)}


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a card has them."""
    return json.loads(json.dumps(dict(options)))
