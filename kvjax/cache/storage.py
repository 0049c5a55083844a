"""Save and load a cache: one safetensors file that knows its model and its policy.

The file's header holds a card: format, kind of cache, the model's fingerprint, the policy's
settings and the tree of fields. Nothing in it is executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.policies.observation import State
from kvjax.tensor_files import write_tensors

FORMAT, VERSION = "kvjax-cache", 1


class Card(NamedTuple):
    """What the header of a cache file says."""

    kind: str
    model: str  # `Decoder.fingerprint`
    dtype: str  # of the keys
    policy: str  # the policy's name
    settings: dict[str, Any]  # `settings(policy)`
    params: str | None  # hash of the policy's learned arrays
    budget: Any
    record: Any  # whatever the writer adds
    tree: dict[str, Any]


def save_cache(
    cache: Any,
    path: str | os.PathLike[str],
    *,
    model: Decoder,
    policy: Policy,
    budget: Any = None,
    params: Any = None,
    record: Any = None,
) -> Path:
    """Writes a cache to a safetensors file, whole or not at all.

    Args:
      cache: a `PaddedCache`, or any other dataclass of arrays that `kvjax.cache` exports.
      path: the file; one that is there is replaced once the new one is complete.
      model, policy, params: what filled the cache; `load_cache` refuses others.
      budget: entries per head, or a `Budget`.
      record: JSON values to keep beside the cache; `read_card(path).record` gives them back.

    Raises:
      ValueError: the cache holds something that cannot be stored.
    """
    path = Path(path)
    tensors: dict[str, np.ndarray] = {}
    card = {
        "format": FORMAT,
        "version": VERSION,
        "kind": type(cache).__name__,
        "model": model.fingerprint(),
        "dtype": jnp.dtype(cache.keys.dtype).name,
        "policy": policy.name,
        "settings": settings(policy),
        "params": _params_hash(params),
        "budget": _plain(budget),
        "record": record,
        "tree": _flatten(cache, "cache", tensors),
    }
    header = {FORMAT: json.dumps(card, sort_keys=True)}
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_tensors(partial, tensors, header)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path


def load_cache(
    path: str | os.PathLike[str],
    *,
    model: Decoder,
    policy: Policy,
    budget: Any = None,
    params: Any = None,
) -> Any:
    """Reads a cache that `save_cache` wrote with the same model, policy and learned arrays.

    A `budget` other than None must be the stored one.

    Raises:
      ValueError: another model, policy, setting or budget; a truncated or foreign file.
    """
    card = read_card(path)
    check_model(card, model, path)
    _check_policy(card, policy, params, path)
    if budget is not None and _plain(budget) != card.budget:
        raise ValueError(f"{path}: cache with budget {card.budget}, given is {_plain(budget)}")
    with _opened(path) as file:
        try:
            return _unflatten(card.tree, file)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: damaged cache file ({_first_line(error)})") from error


def read_card(path: str | os.PathLike[str]) -> Card:
    """The header of a cache file, without reading its arrays.

    Raises:
      ValueError: a truncated or foreign file, or one of another version.
    """
    with _opened(path) as file:
        metadata = file.metadata() or {}
    try:
        card = json.loads(metadata.get(FORMAT, "null"))
        if card is None:
            raise ValueError(f"{path}: a safetensors file, but not a cache: no {FORMAT!r} in it")
        if card["version"] != VERSION:
            raise ValueError(f"{path}: cache format {card['version']}: allowed is {VERSION}")
        return Card(**{name: card[name] for name in Card._fields})
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged cache header ({_first_line(error)})") from error


def check_model(card: Card, model: Decoder, path: str | os.PathLike[str]) -> None:
    """Refuses the cache of another model."""
    if card.model != (given := model.fingerprint()):
        raise ValueError(f"{path}: cache of model {card.model}, given is model {given}")


def settings(policy: Policy) -> dict[str, Any]:
    """All settings of a policy as JSON values: classes by name, fields by value."""
    return _plain(policy)


def settings_hash(policy: Policy) -> str:
    """16 hex digits that identify a policy with all its settings."""
    return _hash(settings(policy))


def _check_policy(card: Card, policy: Policy, params: Any, path: Any) -> None:
    if card.policy != policy.name:
        raise ValueError(f"{path}: cache of policy {card.policy!r}, given is {policy.name!r}")
    stored, given = dict(_leaves(card.settings)), dict(_leaves(settings(policy)))
    differing = [n for n in sorted(stored.keys() | given.keys()) if stored.get(n) != given.get(n)]
    if differing:
        before, now = (
            ", ".join(f"{name}={found.get(name)!r}" for name in differing)
            for found in (stored, given)
        )
        raise ValueError(
            f"{path}: cache of policy {card.policy!r} with {before} (settings "
            f"{_hash(card.settings)}), given is {now} (settings {settings_hash(policy)})"
        )
    if card.params != (learned := _params_hash(params)):
        raise ValueError(
            f"{path}: cache of policy {card.policy!r} with learned arrays {card.params}, given "
            f"are {learned}"
        )


def _flatten(value: Any, name: str, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """The tree of `value` as JSON; its arrays go into `tensors` by their path."""
    if isinstance(value, jax.Array | np.ndarray):
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            raise ValueError(f"{name}: arrays of dtype {value.dtype} cannot be stored")
        tensors[name] = np.asarray(value, order="C")
        return {"tensor": name}
    if dataclasses.is_dataclass(value) and type(value).__name__ in _kinds():
        fields = {
            field.name: _flatten(getattr(value, field.name), f"{name}.{field.name}", tensors)
            for field in dataclasses.fields(value)
        }
        return {"kind": type(value).__name__, "fields": fields}
    if isinstance(value, dict):
        items = {key: _flatten(part, f"{name}.{key}", tensors) for key, part in value.items()}
        return {"items": items}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise ValueError(f"{name}: a {type(value).__name__} cannot be stored in a cache file")


def _unflatten(tree: Any, file: Any) -> Any:
    if "tensor" in tree:
        return jnp.asarray(file.get_tensor(tree["tensor"]))
    if "kind" in tree:
        kind = _kinds()[tree["kind"]]
        return kind(**{name: _unflatten(part, file) for name, part in tree["fields"].items()})
    if "items" in tree:
        return {name: _unflatten(part, file) for name, part in tree["items"].items()}
    return tree["value"]


def _kinds() -> dict[str, Any]:
    """The dataclasses that a file may name: what `kvjax.cache` exports, and policy state."""
    import kvjax.cache as caches

    exported = {name: getattr(caches, name) for name in caches.__all__}
    found = {name: kind for name, kind in exported.items() if dataclasses.is_dataclass(kind)}
    return {State.__name__: State} | found


class _opened:
    """A safetensors file whose reading errors are one line."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __enter__(self) -> Any:
        from safetensors import SafetensorError, safe_open

        with self.path.open("rb"):  # its error, unlike that of safetensors, names the file
            pass
        try:
            self.file = safe_open(self.path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{self.path}: truncated, or not a safetensors file ({_first_line(error)})"
            ) from error
        return self.file.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        from safetensors import SafetensorError

        self.file.__exit__(kind, error, trace)
        if isinstance(error, SafetensorError):
            raise ValueError(f"{self.path}: damaged cache file ({_first_line(error)})") from error


def _plain(value: Any) -> Any:
    """JSON values: dataclasses with their class, arrays by a hash of their content."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"class": type(value).__name__} | {key: _plain(v) for key, v in fields.items()}
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(value)
        return array.tolist() if array.size <= 8 else f"array {_array_hash(array)}"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        return [(name, value)]
    parts = [_leaves(part, f"{name}.{key}" if name else key) for key, part in value.items()]
    return [leaf for part in parts for leaf in part]


def _params_hash(params: Any) -> str | None:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        return None
    named = {jax.tree_util.keystr(path): _array_hash(np.asarray(leaf)) for path, leaf in leaves}
    return _hash(named)


def _array_hash(array: np.ndarray) -> str:
    digest = hashlib.sha256(f"{array.dtype.name}{array.shape}".encode())
    digest.update(np.asarray(array, order="C").tobytes())
    return digest.hexdigest()[:16]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
