"""What an attention output loses when one entry is removed: the score of ReST-KV and CAOTE."""

from kernels_pallas.removal_error.api import removal_error, restkv_scores

__all__ = ["removal_error", "restkv_scores"]
