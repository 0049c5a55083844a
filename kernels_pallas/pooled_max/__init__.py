"""For each key the largest score that any query gives it, and the query that does."""

from kernels_pallas.pooled_max.api import pooled_max

__all__ = ["pooled_max"]
