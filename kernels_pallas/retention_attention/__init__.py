"""Attention in which each key fades with age at a rate of its own, for training retention gates."""

from kernels_pallas.retention_attention.api import retention_attention, segment_attention

__all__ = ["retention_attention", "segment_attention"]
