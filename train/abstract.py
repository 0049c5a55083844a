"""A training step from shapes alone, to be compiled for devices that need not be there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.models.layout import layout
from kvjax.models.sharding import parameter_sharding
from train import devices
from train.config import TrainConfig
from train.loop import TrainState, step_function, transformation
from train.recipes import recipe_of


def model_shapes(config: ModelConfig, mesh: Mesh, dtype: DTypeLike = jnp.bfloat16) -> Decoder:
    """A decoder whose parameters are shapes with their place on the mesh."""
    parameters = {
        row.name: jax.ShapeDtypeStruct(row.shape, dtype, sharding=parameter_sharding(row, mesh))
        for row in layout(config)
    }
    return Decoder(config, parameters)


def trace_step(config: TrainConfig, model: Decoder, mesh: Mesh) -> jax.stages.Traced:
    """One step of the run on `mesh`; `config.mesh` is not looked at.

    `model` is `model_shapes` for the mesh. `.lower().compile()` compiles the result.
    """
    recipe, transform = recipe_of(config), transformation(config)

    def make(model: Decoder, key: jax.Array) -> TrainState:
        params = recipe.init(model, key)
        return TrainState(jnp.int32(0), params, transform.init(params))

    state = jax.eval_shape(make, model, jax.random.key(config.seed))
    shardings = devices.state_shardings(state, recipe.axes(state.params), mesh)
    state = jax.tree.map(
        lambda spec, where: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=where),
        state,
        shardings,
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    fixed = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=everywhere),
        jax.eval_shape(recipe.fixed, model),
    )
    names = {"tokens": jnp.int32, "segments": jnp.int32, "positions": jnp.int32, "labels": bool}
    if config.kind == "eraser":
        names["parts"] = jnp.int32
    rows = devices.batch_sharding(mesh)
    batch: dict[str, Any] = {
        name: jax.ShapeDtypeStruct((config.batch, config.length), dtype, sharding=rows)
        for name, dtype in names.items()
    }
    return step_function(config, recipe, transform, state, mesh).trace(state, model, batch, fixed)
