"""Attention of a few queries over a paged cache whose heads have lengths of their own."""

from kernels_pallas.ragged_decode.api import paged_attention
from kernels_pallas.ragged_decode.reference import gather_pages

__all__ = ["gather_pages", "paged_attention"]
