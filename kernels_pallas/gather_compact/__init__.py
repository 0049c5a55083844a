"""Moves the kept entries of every head to the front."""

from kernels_pallas.gather_compact.api import compact, in_place
from kernels_pallas.gather_compact.reference import gather_slots

__all__ = ["compact", "gather_slots", "in_place"]
