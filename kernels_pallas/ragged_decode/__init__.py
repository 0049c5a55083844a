"""Attention of a few queries over a padded or paged cache whose heads have lengths of their own."""

from kernels_pallas.ragged_decode.api import (
    decode_attention,
    decode_mass,
    paged_attention,
    paged_mass,
)
from kernels_pallas.ragged_decode.reference import gather_pages

__all__ = ["decode_attention", "decode_mass", "gather_pages", "paged_attention", "paged_mass"]
