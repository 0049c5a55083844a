"""`kvjax env`: versions, devices, and the kernel that each operation takes here, and why."""

from __future__ import annotations

import argparse

DESCRIPTION = """\
Show what kvjax runs on: versions, devices, and for every operation of kernels_pallas which
implementation it takes here and why. KVJAX_KERNELS=portable|tpu|gpu|OPERATION=NAME,... overrides
the choice."""
EXAMPLE = "kvjax env --dtype float32"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of the cache that operations are tried with (default bfloat16)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints it.

    Raises:
      ValueError: KVJAX_KERNELS names what there is not.
    """
    from kernels_pallas.probe import probe
    from kvjax import environment

    for name, value in {**environment.versions(), **environment.devices()}.items():
        print(f"{name:<20} {value}")
    print()
    for name, choice in probe(args.dtype).items():
        print(f"{name:<20} {choice.implementation:<12} {choice.reason}")
    return 0
