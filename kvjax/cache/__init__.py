"""Caches: pytrees of fixed shapes with explicit positions."""

from kvjax.cache.padded import PaddedCache, map_rows, nbytes, stack_rows, take_rows

__all__ = ["PaddedCache", "map_rows", "nbytes", "stack_rows", "take_rows"]
