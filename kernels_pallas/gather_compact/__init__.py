"""Moves the kept entries of every head to the front."""

from kernels_pallas.gather_compact.api import gather_slots

__all__ = ["gather_slots"]
