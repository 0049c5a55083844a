"""What a latent memory can give back, by how it is read, gated and combined.

    python benchmarks/memory_variants.py [--policy indexmem-no-memory] [--steps 150]

All variants learn side by side, on the same documents and the same evicted entries, which costs one
pass of the model for all of them. Then each is measured on documents of other seeds at fixed shares
of evicted entries: gap closed, 1 - |o - restored|^2 / |o - o_attn|^2 over all tokens behind the
cut, is 1 where the full cache is restored and 0 where nothing is gained. Writes
memory_variants.json and .md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from vs_kvpress import ROOT, commit, machine

CONFIG = ROOT / "configs" / "indexmem_smollm2.yaml"  # its data
SHARES = (0.5, 0.75, 0.9)
VARIANTS: dict[str, dict[str, Any]] = {
    "residual, compact, one gate (the paper's)": {},
    "residual, dense, one gate": {"phi": "dense"},
    "residual, per head": {"phi": "per_head", "gate": "per_head"},
    "convex, compact, one gate": {"combine": "convex"},
    "convex, per head": {"combine": "convex", "phi": "per_head", "gate": "per_head"},
    "lse, compact, one gate": {"combine": "lse"},
    "lse, per head": {"combine": "lse", "phi": "per_head", "gate": "per_head"},
    "lse, per head, 2.7x the features": {
        "combine": "lse", "phi": "per_head", "gate": "per_head", "features": 192,
    },
}  # fmt: skip


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import optax

    import kvjax
    from train import config, data
    from train.memory import MemoryTraining, cut_documents, init_for, layer_error
    from train.passes import frozen_pass

    settings = config.load(CONFIG)
    loaded = kvjax.load(arguments.model)
    model, selector = loaded.model, kvjax.policy(arguments.policy)
    selector_params = kvjax.policy_params(model, selector)
    trainings = {name: MemoryTraining(**given) for name, given in VARIANTS.items()}
    params = {
        name: init_for(one.memory, model, jax.random.key(0)) for name, one in trainings.items()
    }
    common = next(iter(trainings.values()))
    memories = {name: one.memory for name, one in trainings.items()}

    def batches(seed: int) -> Any:
        return data.build(settings.data, loaded.tokenizer, length=512, batch=1, seed=seed)

    def errors(params: Any, model: Any, batch: Any, key: Any, share: Any) -> Any:
        """Per variant the layers' errors, losses without it, and mean weights; one pass for all."""
        cut = cut_documents(common, selector, selector_params, model, batch, key, share)
        frequencies = jnp.asarray(model.rope_frequencies[0])

        def visit(layer: Any, own: Any) -> Any:
            return {
                name: layer_error(one, own[0][name], layer, own[1], cut, frequencies)
                for name, one in memories.items()
            }

        return frozen_pass(model, cut.batch, visit, (params, cut.kept))[1]

    def loss(params: Any, model: Any, batch: Any, key: Any) -> Any:
        found = errors(params, model, batch, key, None)
        left = {name: jnp.mean(error / lost) for name, (error, lost, _) in found.items()}
        gates = {name: jnp.mean(weight) for name, (_, _, weight) in found.items()}
        return sum(left.values()), (left, gates)

    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, 20, arguments.steps, 1e-5)
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adamw(rate, weight_decay=0.0))
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, model: Any, batch: Any, key: Any) -> Any:
        (_, told), gradient = jax.value_and_grad(loss, has_aux=True)(params, model, batch, key)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, told

    def on_device(batch: Any) -> Any:
        return {name: jnp.asarray(array) for name, array in batch.items()}

    start, rows, course = time.perf_counter(), batches(1), []
    for number in range(arguments.steps):
        key = jax.random.fold_in(jax.random.key(1), number)
        params, state, (left, gates) = step(params, state, model, on_device(next(rows)), key)
        course.append({name: short([1 - left[name], gates[name]]) for name in left})
        if number % 25 == 24:
            told = {name: round(float(np.median([one[name][0] for one in course[-25:]])), 3)
                    for name in left}  # fmt: skip
            print(f"[{number + 1}/{arguments.steps}] {time.perf_counter() - start:.0f} s {told}",
                  flush=True)  # fmt: skip
    rows.close()

    measured = jax.jit(errors)
    found: dict[str, dict[str, list[list[list[float]]]]] = {name: {} for name in VARIANTS}
    rows = batches(1000)
    for number in range(arguments.documents):
        batch, key = on_device(next(rows)), jax.random.fold_in(jax.random.key(2), number)
        for share in SHARES:
            told = measured(params, model, batch, key, jnp.float32(share))
            for name, (error, lost, _) in told.items():
                found[name].setdefault(str(share), []).append([short(error), short(lost)])
    rows.close()
    return {
        "commit": commit(),
        "machine": machine(),
        "model": arguments.model,
        "policy": arguments.policy,
        "steps": arguments.steps,
        "documents": arguments.documents,
        "memories": {name: dataclasses.asdict(one) for name, one in memories.items()},
        "course": course,
        "found": found,
    }


def short(numbers: Any) -> list[float]:
    """In four digits: a file of all of them stays readable."""
    return [float(f"{float(number):.4g}") for number in numbers]


def gap_closed(pairs: list[list[list[float]]]) -> tuple[float, float, float, np.ndarray]:
    """Mean over layers of 1 - sum of errors / sum of losses, its 95 % interval, and by layer."""
    array = np.asarray(pairs)  # [documents, 2, layers]
    draw = np.random.default_rng(0)
    picks = draw.integers(0, len(array), (2000, len(array)))

    def closed(chosen: np.ndarray) -> np.ndarray:
        sums = chosen.sum(axis=-3)
        return 1 - sums[..., 0, :] / sums[..., 1, :]

    spread = closed(array[picks]).mean(axis=-1)
    by_layer = closed(array)
    return by_layer.mean(), *np.quantile(spread, (0.025, 0.975)), by_layer


def page(results: dict[str, Any]) -> str:
    lines = [
        "# What a latent memory gives back",
        "",
        f"Gap closed, mean over layers, under `{results['policy']}` on {results['model']}; "
        f"{results['steps']} steps each, then {results['documents']} documents of other seeds, "
        f"95 % intervals over documents; {results['machine']}, commit {results['commit']}. 1: the "
        "full cache is restored; 0: nothing is gained. The best layer's in parentheses.",
        "",
        "| memory | gate at the end | " + " | ".join(f"{share:.0%} evicted" for share in SHARES)
        + " |",
        "|---|--:|" + "--:|" * len(SHARES),
    ]  # fmt: skip
    for name, by_share in results["found"].items():
        gates = [one[name][1] for one in results["course"][-25:]]
        cells = []
        for share in SHARES:
            middle, low, high, layers = gap_closed(by_share[str(share)])
            cells.append(f"{middle:.3f} [{low:.3f}, {high:.3f}] ({layers.max():.2f})")
        lines.append(f"| {name} | {np.mean(gates):.3f} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "Command: `python benchmarks/memory_variants.py`.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--policy", default="indexmem-no-memory")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--documents", type=int, default=24)
    output = ROOT / "docs" / "results" / "memory_variants"
    parser.add_argument("--output", type=Path, default=output)
    arguments = parser.parse_args()
    results = measure(arguments)
    arguments.output.with_suffix(".json").write_text(json.dumps(results) + "\n")
    arguments.output.with_suffix(".md").write_text(page(results), encoding="utf-8")
    print(page(results))


if __name__ == "__main__":
    main()
