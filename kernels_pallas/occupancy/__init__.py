"""Soft cache occupancy: how many tokens, weighted by their decayed retention, each one finds."""

from kernels_pallas.occupancy.api import occupancy, occupancy_at

__all__ = ["occupancy", "occupancy_at"]
