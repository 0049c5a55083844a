"""The arrays that a policy brings along: learned ones, and what a model's weights give once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from kvjax.inference import observe
from kvjax.learned import modules
from kvjax.learned.indexer import IndexerConfig, init_indexer
from kvjax.learned.memory import MemoryConfig
from kvjax.learned.retention import GateConfig, init_gates, per_layer
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Policy, Scorer
from kvjax.policies.indexmem import IndexMem
from kvjax.policies.latent_memory import LatentMemory
from kvjax.policies.qfilters import QFilters, calibrate
from kvjax.policies.reconstruction import output_factor
from kvjax.policies.registry import options, policy_names
from kvjax.policies.registry import policy as named_policy
from kvjax.policies.restkv import ReSTKV
from kvjax.policies.retention import Retention
from kvjax.policies.snapkv import SnapKV

SCORER_DIRECTORY = "scorer"  # within an exported memory: the scorer that was trained beside it

type Calibration = Sequence[int] | Callable[[], Sequence[int]] | None


def policy_params(model: Decoder, policy: Policy | str, calibration: Calibration = None) -> Any:
    """`params` for every function that takes them; None for policies that have none.

    Under a remainder that remembers they are {"scorer": the scorer's, "memory": the remainder's},
    else the scorer's alone. Learned policies read their module: the directory of their option
    `path` (a memory: `memory_path`), else the one that ships for this backbone. ReST-KV factors
    the output projections, which saves doing it in every call. Q-Filters needs `calibration`, the
    tokens of some text (or a function that makes them). Costs a moment: do it once per model and
    policy.

    Raises:
      FileNotFoundError: a learned policy without weights for this backbone.
      ValueError: a module of another backbone, or no calibration where it is needed.
    """
    policy = named_policy(policy) if isinstance(policy, str) else policy
    found = [arrays for scorer, arrays in _ARRAYS.items() if isinstance(policy.scorer, scorer)]
    own = found[0](model, policy, calibration) if found else None
    return {"scorer": own, "memory": _memory(model, policy)} if policy.remembers else own


def module_directories(model: Decoder, policy: Policy | str) -> list[Path]:
    """Where the trained modules lie that `policy_params` reads; none for untrained policies.

    Raises:
      FileNotFoundError: none ships for this backbone.
    """
    policy = named_policy(policy) if isinstance(policy, str) else policy
    scorer, remainder, found = policy.scorer, policy.remainder, []
    if isinstance(scorer, IndexMem | Retention):
        found.append(_directory(model, scorer.module, scorer.path))
    if policy.remembers and isinstance(remainder, LatentMemory):
        found.append(_directory(model, _memory_name(policy), remainder.path))
    return found


def load_policy(path: str | Path, model: Decoder) -> tuple[Policy, Any]:
    """The policy that an exported module serves, and its `params`.

    Raises:
      FileNotFoundError: no module at `path`.
      ValueError: a module of another backbone, or a damaged one.
    """
    card = modules.read_card(path)
    if card.kind == "eraser":
        raise ValueError(f"{path}: an eraser, which is no policy; kvjax.load_eraser reads it")
    if card.kind != "memory":
        policy = named_policy(card.module, **_trained_options(path, card))
    else:
        beside = Path(path) / SCORER_DIRECTORY
        given = _trained_options(beside, modules.read_card(beside)) if beside.exists() else {}
        policy = named_policy(card.module, memory_path=str(path), **given)
    return policy, policy_params(model, policy)


def _trained_options(path: str | Path, card: modules.Card) -> dict[str, Any]:
    """The options with which the module's policy finds it, and those it was trained with."""
    trained = {name: card.options[name] for name in options(card.module) if name in card.options}
    return {"path": str(path), **trained}


def _retention(model: Decoder, policy: Policy, calibration: Calibration) -> dict[str, Any]:
    assert isinstance(policy.scorer, Retention)
    read = _module(model, policy.scorer.module, policy.scorer.path, "retention")
    config = modules.config_of(read.card, GateConfig, read.directory)
    sizes = model.config
    fresh = functools.partial(
        init_gates,
        config,
        num_layers=sizes.num_layers,
        num_kv_heads=sizes.num_kv_heads,
        hidden_size=sizes.hidden_size,
        bias=0.0,
    )
    modules.check_arrays(read.arrays, jax.eval_shape(fresh, jax.random.key(0)), read.directory)
    return per_layer(config, read.arrays, sizes.num_layers)


def _indexer(model: Decoder, policy: Policy, calibration: Calibration) -> dict[str, Any]:
    scorer = policy.scorer
    assert isinstance(scorer, IndexMem)
    read = _module(model, scorer.module, scorer.path, "indexer")
    sizes, head_dim = model.config, model.config.head_dim
    trained = modules.config_of(read.card, IndexerConfig, read.directory)
    fresh = functools.partial(
        init_indexer,
        trained,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        head_dim=head_dim,
        hidden_size=sizes.hidden_size,
    )
    modules.check_arrays(read.arrays, jax.eval_shape(fresh, jax.random.key(0)), read.directory)
    trained = dataclasses.replace(trained, size=trained.size_of(head_dim))
    asked = dataclasses.replace(scorer.indexer, size=scorer.indexer.size_of(head_dim))
    for name in ("size", "activation", "near"):
        if (given := getattr(asked, name)) != (allowed := getattr(trained, name)):
            raise ValueError(
                f"policy {policy.name!r} has {name}={given!r}, its indexer was trained with "
                f"{allowed!r}: give that, or take both from kvjax.load_policy"
            )
    return read.arrays


def _qfilters(model: Decoder, policy: Policy, calibration: Calibration) -> dict[str, Any]:
    """Q-Filters of every layer, from the queries of one pass over the calibration's tokens."""
    if calibration is None:
        raise ValueError(
            f"policy {policy.name!r} needs calibration: the tokens of some text of the kind it "
            "will see"
        )
    tokens = list(calibration() if callable(calibration) else calibration)
    everything = Policy(name="record", scorer=SnapKV(window=len(tokens)))
    _, _, seen = observe(model, [tokens], policies=(everything,))
    assert seen.queries is not None
    return calibrate(seen.queries[:, 0, :, -len(tokens) :], model.config.num_kv_heads)


def _restkv(model: Decoder, policy: Policy, calibration: Calibration) -> dict[str, Any] | None:
    scorer = policy.scorer
    assert isinstance(scorer, ReSTKV)
    if not scorer.use_wo or scorer.indicator != "reconstruction":
        return None
    heads, granularity = model.config.num_kv_heads, scorer.granularity
    factors = jax.vmap(lambda w: output_factor(w, heads, granularity))
    return {"output_factor": jax.jit(factors)(model.layers.output_projection)}


def _memory(model: Decoder, policy: Policy) -> dict[str, Any]:
    remainder = policy.remainder
    if not isinstance(remainder, LatentMemory):
        raise ValueError(f"policy {policy.name!r}: its remainder has no trained module")
    read = _module(model, _memory_name(policy), remainder.path, "memory")
    trained = modules.config_of(read.card, MemoryConfig, read.directory)
    if trained != remainder.config:
        raise ValueError(
            f"policy {policy.name!r} has {remainder.config}, its memory was trained with "
            f"{trained}: give that, or memory_path"
        )
    return read.arrays


def _memory_name(policy: Policy) -> str:
    """A memory ships under the name of the policy that has one: "indexmem", "snapkv+memory"."""
    name = policy.name
    if name in policy_names() and named_policy(name).remembers:
        return name
    return {"indexmem-no-memory": "indexmem"}.get(name, f"{name}+memory")


_ARRAYS: Mapping[type[Scorer], Callable[[Decoder, Policy, Calibration], Any]] = {
    IndexMem: _indexer,
    QFilters: _qfilters,
    ReSTKV: _restkv,
    Retention: _retention,
}


class _Module(NamedTuple):
    card: modules.Card
    arrays: dict[str, Any]
    directory: Path


def _module(model: Decoder, name: str, path: str | None, kind: str) -> _Module:
    """A module, at `path` or shipped, that was trained for this backbone."""
    directory = _directory(model, name, path)
    card = modules.read_card(directory)
    if card.kind != kind:
        raise ValueError(f"{directory}: a module of kind {card.kind!r}; needed is {kind!r}")
    card.check_backbone(model.fingerprint(), directory)
    return _Module(card, modules.read_arrays(directory), directory)


def _directory(model: Decoder, name: str, path: str | None) -> Path:
    if path is not None:
        return Path(path).expanduser()
    return modules.find_shipped(name, model.fingerprint())
