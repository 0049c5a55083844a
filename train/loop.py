"""The one loop behind every trainer: step, watch, save, resume."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax import processes
from kvjax.models.decoder import Decoder
from train import devices
from train.checkpoints import Checkpoints
from train.claim import claim
from train.config import TrainConfig
from train.metrics import Metrics, Show, progress_line, show
from train.optimizer import learning_rate, optimizer
from train.recipe import Recipe
from train.start import check_backbone

_RECENT = 50  # losses that the explosion guard compares with
_LEAST_LOSS = 1e-3  # a smaller one is compared with as this
EXPORT = "export"


class Stopped(RuntimeError):
    """The run ended early; the message says why, and what was saved."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step changes."""

    step: jax.Array
    params: Any
    optimizer: Any


def train(
    config: TrainConfig,
    recipe: Recipe,
    model: Decoder,
    data: Any,
    progress: Show = show,
) -> TrainState:
    """Runs `config.steps` steps, or what is left of them after the newest checkpoint.

    `data` is an iterator over this process's `rows` of every batch, with `get_state` and
    `set_state` (`train.data.Shards`). The random key of a step follows from seed and step, so a
    resumed run equals an unbroken one. Several processes call this alike; the first one writes.

    Raises:
      ValueError: the output directory holds a run of another config; the module to start from is
        another backbone's.
      Stopped: a loss or gradient that is not finite, a loss that explodes (step and batch are
        saved), SIGTERM, or another process that is gone.
    """
    try:
        return _train(config, recipe, model, data, progress)
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        first_line = str(error).partition("\n")[0]
        raise Stopped(
            f"process {jax.process_index()} of {jax.process_count()} lost the others "
            f"({first_line}); start all of them again to go on from the newest checkpoint"
        ) from error


def _train(
    config: TrainConfig, recipe: Recipe, model: Decoder, data: Any, progress: Show
) -> TrainState:
    directory = Path(config.output)
    claim(config)
    progress = progress if processes.is_first() else _silent
    mesh = devices.mesh_of(config.mesh, config.batch, config.length)
    check_backbone(getattr(config.module, "start", None), model)
    transform = transformation(config)
    state = _initial(config, recipe, model, transform, mesh)
    checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint)
    if (latest := checkpoints.latest) is not None:
        state, place = checkpoints.restore(latest, state)
        data.set_state(place["data"])
        progress(f"resumed at step {latest} of {config.steps}")
    first = int(state.step)
    metrics = Metrics(directory, first) if processes.is_first() else None
    step_fn, fixed = step_function(config, recipe, transform, state, mesh), recipe.fixed(model)
    guard = _Guard(config.explode)
    tokens_per_step = config.batch * config.length
    start, counted = time.perf_counter(), first
    with _terminated() as asked_to_stop:
        for number in range(first + 1, config.steps + 1):
            batch = next(data)
            placed = devices.place_batch(batch, mesh, data.rows, config.batch)
            state, values = step_fn(state, model, placed, fixed)
            values = {name: np.asarray(value).tolist() for name, value in values.items()}
            if (reason := guard.check(values["loss"], values["gradient_norm"])) is not None:
                where = _save_batch(directory, number, batch)
                _close(checkpoints, metrics)
                raise Stopped(f"step {number}: {reason}; its batch is in {where}")
            if number == first + 1:  # compilation is not in the rate
                start, counted = time.perf_counter(), number
            if number % config.log == 0 or number == config.steps:
                spent = max(time.perf_counter() - start, 1e-9)
                rate = (number - counted) / spent
                if metrics is not None:
                    metrics.write(number, {**values, "tokens_per_second": rate * tokens_per_step})
                left = (config.steps - number) / rate if rate else 0.0
                progress(progress_line(number, config.steps, values, rate * tokens_per_step, left))
            stopping = asked_to_stop(number)
            if checkpoints.due(number) or number == config.steps or stopping:
                checkpoints.save(number, state, data.get_state(), {"config": config.hash})
            if stopping and number < config.steps:
                _close(checkpoints, metrics)
                raise Stopped(f"asked to stop: saved at step {number} of {config.steps}")
    _close(checkpoints, metrics)
    return state


def _close(checkpoints: Checkpoints, metrics: Metrics | None) -> None:
    checkpoints.close()
    if metrics is not None:
        metrics.close()


def _silent(line: str) -> None:
    """The progress of processes that tell nothing."""


def one_step(config: TrainConfig, recipe: Recipe, model: Decoder, data: Any) -> dict[str, Any]:
    """The values of a first step, of which nothing is kept: what tells that a run would work."""
    mesh = devices.mesh_of(config.mesh, config.batch, config.length)
    transform = transformation(config)
    state = _initial(config, recipe, model, transform, mesh)
    placed = devices.place_batch(next(data), mesh, data.rows, config.batch)
    step = step_function(config, recipe, transform, state, mesh)
    _, values = step(state, model, placed, recipe.fixed(model))
    return {name: np.asarray(value).tolist() for name, value in values.items()}


def transformation(config: TrainConfig) -> optax.GradientTransformation:
    """The optimizer of a run."""
    return optimizer(config.optimizer, _updates(config), config.accumulation)


def _updates(config: TrainConfig) -> int:
    return max(1, config.steps // config.accumulation)


def _initial(
    config: TrainConfig,
    recipe: Recipe,
    model: Decoder,
    transform: optax.GradientTransformation,
    mesh: Any,
) -> TrainState:
    """Parameters and optimizer state from the seed, laid out by the recipe's named axes."""

    def make(key: jax.Array) -> TrainState:
        params = recipe.init(model, key)
        return TrainState(jnp.int32(0), params, transform.init(params))

    key = jax.random.key(config.seed)
    if mesh is None:
        # Placed as `load` places weights: a step's outputs are, and one compilation serves all.
        return jax.device_put(jax.jit(make)(key), jax.local_devices()[0])
    shapes = jax.eval_shape(make, key)
    shardings = devices.state_shardings(shapes, recipe.axes(shapes.params), mesh)
    return jax.jit(make, out_shardings=shardings)(key)


def step_function(
    config: TrainConfig,
    recipe: Recipe,
    transform: optax.GradientTransformation,
    like: TrainState,
    mesh: Mesh | None,
) -> Any:
    """The jitted step (state, model, batch, fixed) -> (state, values), the state donated.

    `like` is a state, or shapes of one, whose shardings the result has.
    """
    rates = learning_rate(config.optimizer, _updates(config))

    def step(
        state: TrainState, model: Decoder, batch: Any, fixed: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        key = jax.random.fold_in(jax.random.key(config.seed + 1), state.step)
        loss = jax.value_and_grad(recipe.loss, has_aux=True)
        (total, parts), gradients = loss(state.params, model, batch, key, fixed)
        updates, optimizer_state = transform.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        values = {
            "loss": total,
            **parts,
            "gradient_norm": optax.tree.norm(gradients),
            "learning_rate": jnp.asarray(rates(state.step // config.accumulation)),
        }
        return TrainState(state.step + 1, params, optimizer_state), values

    if mesh is None:
        return jax.jit(step, donate_argnums=0)
    # Named, or the donated state is not written in place; and every process can read the values.
    placed = jax.tree.map(lambda array: array.sharding, like)
    return jax.jit(
        step, donate_argnums=0, out_shardings=(placed, NamedSharding(mesh, PartitionSpec()))
    )


class _Guard:
    """Says what is wrong with a step: not finite, or a loss far above all recent ones.

    Not above their median: in a mixture a row of text may lose fifty times what a needle does.
    """

    def __init__(self, factor: float):
        self.factor = factor
        self.recent: deque[float] = deque(maxlen=_RECENT)

    def check(self, loss: float, gradient_norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(gradient_norm):
            return f"the gradient's norm is {gradient_norm}"
        if len(self.recent) == _RECENT:
            largest = max(*self.recent, _LEAST_LOSS)
            if loss > self.factor * largest:
                return f"the loss is {loss:.4g}, {loss / largest:.0f} times its recent largest"
        self.recent.append(loss)
        return None


@contextlib.contextmanager
def _terminated() -> Iterator[Any]:
    """Gives a function of the step that says whether SIGTERM came; the run then saves and leaves.

    One process's signal stops all of them behind the same step.
    """
    if jax.process_count() > 1:  # the runtime has its own handler, and tells the other processes
        from jax.experimental import multihost_utils

        yield multihost_utils.reached_preemption_sync_point
        return
    came: list[int] = []
    try:
        before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    except ValueError:  # not the main thread: its owner handles signals
        yield lambda step: False
        return
    try:
        yield lambda step: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before)


def _save_batch(directory: Path, step: int, batch: dict[str, np.ndarray]) -> Path:
    part = f"-process-{jax.process_index()}" if jax.process_count() > 1 else ""
    path = directory / f"batch-of-step-{step}{part}.npz"
    np.savez(path, **batch)
    return path
