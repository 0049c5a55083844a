"""Attention whose mask is a function of slot position, query position and validity."""

from kernels_pallas.attention.api import attention, causal_attention, merge
from kernels_pallas.attention.mask import NO_WINDOW, visible

__all__ = ["NO_WINDOW", "attention", "causal_attention", "merge", "visible"]
