"""Caches: pytrees of fixed shapes with explicit positions."""

from kvjax.cache.padded import PaddedCache
from kvjax.cache.paged import PagedCache, Pages
from kvjax.cache.rows import Cache, map_rows, nbytes, stack_rows, take_rows

__all__ = [
    "Cache",
    "PaddedCache",
    "PagedCache",
    "Pages",
    "map_rows",
    "nbytes",
    "stack_rows",
    "take_rows",
]
