"""Checkpoints of a run (Orbax): written in the background, the newest few kept, resumed exactly."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax

from kvjax import processes
from train.config import CheckpointConfig


class Checkpoints:
    """Parameters, optimizer state and the place in the data, by step."""

    def __init__(self, directory: Path, config: CheckpointConfig):
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self.config = config
        self.manager = ocp.CheckpointManager(
            directory.absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=config.keep,
                enable_async_checkpointing=True,
                create=True,
                # What a run that was killed left half written; nothing else removes it.
                cleanup_tmp_directories=True,
            ),
        )
        self._last = time.monotonic()

    @property
    def latest(self) -> int | None:
        """The newest step that was saved whole."""
        return self.manager.latest_step()

    def due(self, step: int) -> bool:
        """Whether it is time, by steps or by minutes."""
        if step % self.config.steps == 0:
            return True
        # Clocks differ between processes: the first one's counts, asked rarely enough to be cheap.
        if jax.process_count() > 1 and step % 10:
            return False
        late = time.monotonic() - self._last >= 60 * self.config.minutes
        return processes.as_first_says(late)

    def save(self, step: int, state: Any, place: Any, facts: dict[str, Any]) -> None:
        """Starts to write; `state` may be donated once this returns."""
        ocp = self._ocp
        if step == self.manager.latest_step():
            return
        self.manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                place=ocp.args.JsonSave({"data": place, **facts}),
            ),
        )
        self._last = time.monotonic()

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The state in the shapes and shardings of `like`, and what was saved beside it."""
        ocp = self._ocp
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored = self.manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract), place=ocp.args.JsonRestore()
            ),
        )
        return restored["state"], restored["place"]

    def close(self) -> None:
        """Waits for what is being written."""
        self.manager.wait_until_finished()
        self.manager.close()
