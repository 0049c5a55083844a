"""Trained modules in files: safetensors beside a JSON card that says what they belong to."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.tensor_files import write_tensors

WEIGHTS_FILE, CARD_FILE = "module.safetensors", "card.json"
FORMAT = 1
SHIPPED = Path(__file__).parent / "weights"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """What a module is, and where it comes from.

    `fingerprints` are those of its backbone by dtype: rounding the weights changes them.
    """

    module: str  # "retention-global"
    kind: str  # "retention"
    options: Mapping[str, Any]  # of the module's config
    backbone: str
    fingerprints: Mapping[str, str]
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scores: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    format: int = FORMAT

    def check_backbone(self, fingerprint: str, where: Path) -> None:
        """Refuses another backbone than the one the module was trained for."""
        if fingerprint not in self.fingerprints.values():
            known = ", ".join(f"{name} {value}" for name, value in self.fingerprints.items())
            raise ValueError(
                f"{where}: this module was trained for {self.backbone} ({known}); the model given "
                f"has fingerprint {fingerprint}"
            )


def fingerprints(model: Any) -> dict[str, str]:
    """The fingerprint of a backbone in its own dtype and in those it may be rounded to."""
    own = str(model.dtype)
    found = {own: model.fingerprint()}
    for dtype in ("bfloat16", "float16") if own == "float32" else ():
        found[dtype] = model.fingerprint(dtype)
    return found


def save_module(directory: str | Path, arrays: Mapping[str, Any], card: Card) -> None:
    """Writes both files, the card last: a directory with a card is complete.

    Of several processes the first one writes.
    """
    if jax.process_index() != 0:
        return
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CARD_FILE).unlink(missing_ok=True)
    write_tensors(directory / WEIGHTS_FILE, {name: np.asarray(a) for name, a in arrays.items()})
    text = json.dumps(dataclasses.asdict(card), indent=1, allow_nan=False) + "\n"
    temporary = directory / f".{CARD_FILE}.tmp"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(directory / CARD_FILE)


def read_card(directory: str | Path) -> Card:
    """The card of a module.

    Raises:
      FileNotFoundError: no card there.
      ValueError: a card of another format.
    """
    path = Path(directory).expanduser() / CARD_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"{str(directory)!r} holds no trained module ({CARD_FILE} is missing)"
        ) from error
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    fields = {field.name for field in dataclasses.fields(Card)}
    if not isinstance(content, dict) or content.get("format") != FORMAT or set(content) != fields:
        raise ValueError(f"{path}: not a card of format {FORMAT}")
    return Card(**content)


def read_arrays(directory: str | Path) -> dict[str, Any]:
    """The module's arrays by name."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = Path(directory).expanduser() / WEIGHTS_FILE
    try:
        return {name: jnp.asarray(array) for name, array in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: unreadable ({error})") from error


def digest(directory: str | Path) -> str:
    """16 hex digits that identify what a module computes: its arrays and its options.

    What else is on the card, such as scores measured later, may change.

    Raises:
      FileNotFoundError, ValueError: as in `read_card`, or arrays that are not there.
    """
    card = read_card(directory)
    path = Path(directory).expanduser() / WEIGHTS_FILE
    try:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    options = [card.module, card.kind, dict(card.options)]
    content.update(json.dumps(options, sort_keys=True).encode())
    return content.hexdigest()[:16]


def config_of[C](card: Card, cls: type[C], where: str | Path) -> C:
    """The module's config, from the options of its card.

    Raises:
      ValueError: options that `cls` does not have, or does not allow.
    """
    plain = {n: tuple(v) if isinstance(v, list) else v for n, v in card.options.items()}
    try:
        return cls(**plain)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: options {dict(card.options)} of its card: {error}") from error


def check_arrays(arrays: Mapping[str, Any], wanted: Mapping[str, Any], whose: str | Path) -> None:
    """Refuses other arrays than those of `wanted`: names, shapes, dtypes. `whose` begins the error.

    Raises:
      ValueError: the first that is missing, unknown or different.
    """
    if missing := sorted(wanted.keys() - arrays.keys()):
        raise ValueError(f"{whose}: without {missing[0]!r}: needed are {', '.join(wanted)}")
    if extra := sorted(arrays.keys() - wanted.keys()):
        raise ValueError(f"{whose}: with {extra[0]!r}: needed are {', '.join(wanted)}")
    for name, like in wanted.items():
        found = arrays[name]
        if (found.shape, found.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"{whose}: {name!r} is {found.dtype} of shape {found.shape}: needed is "
                f"{like.dtype} of shape {like.shape}"
            )


def find_shipped(module: str, fingerprint: str) -> Path:
    """Where the module of this name lies that ships for a backbone.

    Raises:
      FileNotFoundError: none does.
    """
    backbones = []
    for card_path in sorted(SHIPPED.glob(f"*/{CARD_FILE}")):
        card = read_card(card_path.parent)
        if card.module == module:
            if fingerprint in card.fingerprints.values():
                return card_path.parent
            backbones.append(card.backbone)
    known = f"they ship for {', '.join(backbones)}" if backbones else "none ship yet"
    raise FileNotFoundError(
        f"no weights of {module!r} for this backbone ({known}); train them with kvjax train, and "
        "give path=DIRECTORY"
    )
