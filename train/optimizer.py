"""AdamW with a schedule, clipping and accumulation, from a config."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) under a learning-rate schedule.

    "cosine" falls from the peak; "wsd" (warmup, stable, decay) stays there and falls linearly over
    the last `decay` share of the steps; both would be at `floor` one step behind the last.
    "constant" stays. The warmup comes first; the rest of a schedule has the steps that are left.
    """

    learning_rate: float = 2e-4
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: int = 100  # steps from 0 to the peak
    decay: float = 0.2  # share of the steps
    floor: float = 1e-6
    weight_decay: float = 1e-6
    clip: float = 1.0  # of the global gradient norm; 0 does not clip
    beta1: float = 0.9
    beta2: float = 0.999
    # Gates start with gradients near 1e-8 (sigmoid of 15): the usual epsilon would drown them.
    epsilon: float = 1e-12

    def __post_init__(self) -> None:
        if self.schedule not in ("cosine", "wsd", "constant"):
            raise ValueError(
                f"optimizer.schedule={self.schedule!r}: allowed: cosine, wsd, constant"
            )
        for name in ("learning_rate", "epsilon"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"optimizer.{name}={getattr(self, name)}: allowed: numbers > 0")
        for name in ("warmup", "floor", "weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"optimizer.{name}={getattr(self, name)}: allowed: numbers >= 0")
        for name in ("decay", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}={getattr(self, name)}: allowed: [0, 1)")


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate at each of `steps` updates, which are counted from 0."""
    schedule = _schedule(config, steps)
    return lambda step: schedule(jnp.asarray(step, jnp.float32))


def _schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    peak, warmup = config.learning_rate, min(config.warmup, max(steps - 1, 0))
    floor = min(config.floor, peak)
    rest = max(steps - warmup, 1)
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=floor / peak)
    elif config.schedule == "wsd":
        falling = min(max(round(config.decay * steps), 1), rest)
        after = optax.join_schedules(
            [optax.constant_schedule(peak), optax.linear_schedule(peak, floor, falling)],
            [rest - falling],
        )
    else:
        after = optax.constant_schedule(peak)
    if warmup == 0:
        return after
    # The first step already moves: a rate of exactly 0 would waste it.
    rising = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rising, after], [warmup])


def optimizer(
    config: OptimizerConfig, steps: int, accumulation: int
) -> optax.GradientTransformation:
    """The transformation for `steps` updates, each the mean of `accumulation` gradients."""
    parts = [
        optax.adamw(
            learning_rate(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
        )
    ]
    if config.clip:
        parts.insert(0, optax.clip_by_global_norm(config.clip))
    chained = optax.chain(*parts)
    if accumulation > 1:
        several = optax.MultiSteps(chained, every_k_schedule=accumulation)
        chained = several.gradient_transformation()
    return _with_usual_promotion(chained)


def _with_usual_promotion(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Optax mixes dtypes and ranks as JAX allows by default; ours may be run under strict rules."""

    def usual[**P, R](function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                return function(*args, **kwargs)

        return run

    return optax.GradientTransformation(usual(inner.init), usual(inner.update))
