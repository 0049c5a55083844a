"""`kvjax convert`: a checkpoint in another format."""

from __future__ import annotations

import argparse

DESCRIPTION = """\
Read a checkpoint (a Hugging Face directory, a GGUF file, an Orbax directory, a hub id, or the
name of the embedded model) and write it as an Orbax or a Hugging Face directory."""
EXAMPLE = "kvjax convert smollm2-135m-instruct checkpoints/smollm2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="name or path of the checkpoint to read")
    parser.add_argument("destination", help="directory to write; new or empty")
    parser.add_argument(
        "--format",
        choices=("orbax", "hf"),
        default="orbax",
        help="orbax loads fastest here (default); hf writes safetensors for other software",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type of the written weights (default: float32 on CPU, bfloat16 elsewhere)",
    )


def run(arguments: argparse.Namespace) -> None:
    from pathlib import Path

    destination = Path(arguments.destination)
    # Refused before minutes of reading, not after.
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise ValueError(f"{destination} exists and is not empty: name a new directory")

    import kvjax
    from kvjax.models import orbax

    model, tokenizer = kvjax.load(arguments.source, dtype=arguments.dtype)
    write = orbax.save if arguments.format == "orbax" else orbax.export_hf
    write(model, tokenizer, destination)
    print(f"{destination}: {model.nbytes / 2**20:,.0f} MiB of weights, {arguments.format}")
