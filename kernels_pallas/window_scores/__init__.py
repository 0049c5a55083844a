"""Attention weights of a window of queries over all cached entries."""

from kernels_pallas.window_scores.api import window_attention
from kernels_pallas.window_scores.reference import window_attention_reference

__all__ = ["window_attention", "window_attention_reference"]
