"""How a window of queries attends to all cached entries, and what scorers make of it."""

from kernels_pallas.window_scores.api import window_attention, window_moments, window_scores
from kernels_pallas.window_scores.reference import window_attention_reference

__all__ = ["window_attention", "window_attention_reference", "window_moments", "window_scores"]
