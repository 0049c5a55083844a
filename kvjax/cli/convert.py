"""`kvjax convert`: a checkpoint in another format."""

from __future__ import annotations

import argparse

DESCRIPTION = """\
Read a checkpoint (a Hugging Face directory, a GGUF file, an Orbax directory, a hub id, or the
name of the embedded model) and write it as an Orbax or a Hugging Face directory."""
EXAMPLE = "kvjax convert smollm2-135m-instruct checkpoints/smollm2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="name or path of the checkpoint to read")
    parser.add_argument("destination", help="directory to write; must not exist yet")
    parser.add_argument(
        "--format",
        choices=("orbax", "hf"),
        default="orbax",
        help="orbax loads fastest here (default); hf writes safetensors for other software",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type of the written weights (default: that of the source)",
    )


def run(arguments: argparse.Namespace) -> None:
    from pathlib import Path

    destination = Path(arguments.destination)
    if destination.exists():
        raise ValueError(f"{destination} exists already: choose a new path or remove it first")

    import kvjax
    from kvjax.models import orbax

    options = {} if arguments.dtype is None else {"dtype": arguments.dtype}
    model, tokenizer = kvjax.load(arguments.source, **options)
    write = orbax.save if arguments.format == "orbax" else orbax.export_hf
    write(destination, model, tokenizer)
    print(f"{destination}: {model.nbytes / 2**20:,.0f} MiB of weights, {arguments.format}")
