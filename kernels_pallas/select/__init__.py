"""Selection of the entries that stay: lexicographic, deterministic, exact under ties."""

from kernels_pallas.select.api import competing_threshold, keep_mask, kept_indices
from kernels_pallas.select.order import order_key

__all__ = ["competing_threshold", "keep_mask", "kept_indices", "order_key"]
