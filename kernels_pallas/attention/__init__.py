"""Attention whose mask is a function of slot position, query position and validity."""

from kernels_pallas.attention.api import attention, merge
from kernels_pallas.attention.mask import NO_WINDOW, visible

__all__ = ["NO_WINDOW", "attention", "merge", "visible"]
