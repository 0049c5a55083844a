"""A small training run of `kvjax train`, and one process of it that can be watched and killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import yaml

import kvjax
from kvjax.models import orbax
from kvjax.models.tokenizer import Tokenizer, import_transformers

ROOT = Path(__file__).resolve().parents[1]
UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a checkpoint that is being written
POLL = 0.002  # seconds
_STEP = re.compile(rb"^\[(\d+)/\d+\]", re.MULTILINE)
_RESUMED = re.compile(rb"^resumed at step (\d+) of", re.MULTILINE)


def prepare(folder: Path, save_seconds: float, *, length: int = 128, batch: int = 4) -> Path:
    """Writes a random model, two texts and the config of a run, and says where the config is."""
    rng = np.random.default_rng(0)
    tokenizer = _bytes_tokenizer()
    model = kvjax.ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=64, intermediate_size=128, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=16,
    )  # fmt: skip
    orbax.save(kvjax.Decoder.random(model, jax.random.key(0)), tokenizer, folder / "model")
    words = ["".join(rng.choice(list("aeioulmnrst"), size)) for size in rng.integers(2, 9, 300)]
    for name in ("first.txt", "second.txt"):
        documents = (" ".join(rng.choice(words, size)) for size in rng.integers(5, 40, 400))
        (folder / name).write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    config = {
        "model": str(folder / "model"),
        "module": {"kind": "retention", "width": 32, "memory": 16, "positions": 32},
        "data": [
            {"text": str(folder / "first.txt"), "weight": 2},
            {"text": str(folder / "second.txt")},
        ],
        "length": length,
        "batch": batch,
        "steps": 100,
        "log": 1,
        "checkpoint": {"steps": 10**9, "minutes": save_seconds / 60, "keep": 2},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def _bytes_tokenizer() -> Tokenizer:
    """A token per byte, and one that ends a text."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    vocab = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    transformers = import_transformers()
    return Tokenizer(
        transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    )


class Life:
    """One process of a run, from its start to its end or its being killed.

    `before` is the step at which the process before it was killed: `back` says after how many
    seconds this one has made that step again, None where it never did.
    """

    def __init__(self, config: Path, output: Path, steps: int, before: int = 0):
        self.output, self.before, self.back = output, before, None if before else 0.0
        self.log = output.with_name(output.name + ".log")
        flags = os.environ.get("XLA_FLAGS", "")
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            # Several threads add a sum's parts in any order: its last bit would differ.
            "XLA_FLAGS": f"{flags} --xla_cpu_multi_thread_eigen=false".strip(),
        }
        command = [sys.executable, "-m", "kvjax.cli.main", "train", str(config)]
        command += ["--output", str(output), "--steps", str(steps)]
        self.started = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def step(self) -> int | None:
        """The last step that this process has told of."""
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 1000))
            found = _STEP.findall(log.read())
        return int(found[-1]) if found else None

    @property
    def resumed(self) -> int:
        """The step of the checkpoint that it went on from, 0 for none."""
        found = _RESUMED.search(self.log.read_bytes())
        return int(found[1]) if found else 0

    @property
    def unfinished(self) -> bool:
        """Whether a checkpoint is being written, or has been left half written."""
        folder = self.output / "checkpoints"
        return any(UNFINISHED in path.name for path in folder.glob("*"))

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Until the condition holds; False where the run has come to its end before that.

        Raises:
          RuntimeError: the process failed.
        """
        while True:
            if self.back is None and (self.step or 0) >= self.before:
                self.back = time.monotonic() - self.started
            if condition():
                return True
            if (status := self.process.poll()) is not None:
                if status:
                    end = self.log.read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"{self.output.name}: exit status {status}\n{end}")
                return False
            time.sleep(POLL)

    def finish(self) -> Life:
        """Waits for the end of the run."""
        self.wait(lambda: False)
        return self

    def kill(self) -> None:
        """As where a machine is lost: nothing is told to the process."""
        self.process.kill()
        self.process.wait()
