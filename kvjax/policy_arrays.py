"""The arrays that a policy brings along: learned ones, and what a model's weights give once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from kvjax.inference import observe
from kvjax.learned import modules
from kvjax.learned.retention import GateConfig, per_layer
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.policies.qfilters import QFilters, calibrate
from kvjax.policies.reconstruction import output_factor
from kvjax.policies.registry import policy as named_policy
from kvjax.policies.restkv import ReSTKV
from kvjax.policies.retention import Retention
from kvjax.policies.snapkv import SnapKV


def policy_params(
    model: Decoder,
    policy: Policy | str,
    calibration: Sequence[int] | Callable[[], Sequence[int]] | None = None,
) -> Any:
    """`params` for every function that takes them; None for policies that have none.

    Learned policies read their module: the directory of their option `path`, else the one that
    ships for this backbone. ReST-KV factors the output projections, which saves doing it in every
    call. Q-Filters needs `calibration`, the tokens of some text (or a function that makes them).
    Costs a moment: do it once per model and policy.

    Raises:
      FileNotFoundError: a learned policy without weights for this backbone.
      ValueError: a module of another backbone, or no calibration where it is needed.
    """
    policy = named_policy(policy) if isinstance(policy, str) else policy
    scorer = policy.scorer
    if isinstance(scorer, Retention):
        return _gates(model, scorer.module, scorer.path)
    if isinstance(scorer, QFilters):
        if calibration is None:
            raise ValueError(
                f"policy {policy.name!r} needs calibration: the tokens of some text of the kind it "
                "will see"
            )
        return _filters(model, calibration() if callable(calibration) else calibration)
    if isinstance(scorer, ReSTKV) and scorer.use_wo and scorer.indicator == "reconstruction":
        heads, granularity = model.config.num_kv_heads, scorer.granularity
        factors = jax.vmap(lambda w: output_factor(w, heads, granularity))
        return {"output_factor": jax.jit(factors)(model.layers.output_projection)}
    return None


def _filters(model: Decoder, tokens: Sequence[int]) -> dict[str, Any]:
    """Q-Filters of every layer, from the queries of one pass over `tokens`."""
    everything = Policy(name="record", scorer=SnapKV(window=len(tokens)))
    _, _, seen = observe(model, [list(tokens)], policies=(everything,))
    assert seen.queries is not None
    return calibrate(seen.queries[:, 0, :, -len(tokens) :], model.config.num_kv_heads)


def load_policy(path: str | Path, model: Decoder) -> tuple[Policy, Any]:
    """The policy that an exported module serves, and its `params`.

    Raises:
      FileNotFoundError: no module at `path`.
      ValueError: a module of another backbone, or a damaged one.
    """
    policy = named_policy(modules.read_card(path).module, path=str(path))
    return policy, policy_params(model, policy)


def _gates(model: Decoder, module: str, path: str | None) -> dict[str, Any]:
    fingerprint = model.fingerprint()
    directory = modules.find_shipped(module, fingerprint) if path is None else Path(path)
    card = modules.read_card(directory)
    if card.kind != "retention":
        raise ValueError(f"{directory}: a module of kind {card.kind!r}; needed is 'retention'")
    card.check_backbone(fingerprint, directory)
    gates = modules.read_arrays(directory)
    return per_layer(GateConfig(**card.options), gates, model.config.num_layers)
