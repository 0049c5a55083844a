"""Column statistics of attention: how all queries together attend to each slot."""

from kernels_pallas.column_attention.api import column_attention

__all__ = ["column_attention"]
