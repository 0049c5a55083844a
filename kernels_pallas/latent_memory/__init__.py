"""The latent state of IndexMem: what evicted entries are written to and later queries read."""

from kernels_pallas.latent_memory.api import memory_read, memory_update

__all__ = ["memory_read", "memory_update"]
