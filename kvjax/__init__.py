"""kvjax: long contexts in bounded memory."""

# Models
# Caches and budgets
from kvjax.budget import Budget, bucket_length
from kvjax.cache import PaddedCache, PagedCache, Pages, nbytes, stack_rows, take_rows

# Decoding
from kvjax.generation import Generation, Sampling
from kvjax.inference import compress, extend, generate, observe, prefill, stream
from kvjax.models.checkpoint import Loaded, load
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder

# Policies
from kvjax.policies import Policy, Protection, Schedule, Scorer, policy, policy_names, register

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "Decoder",
    "Generation",
    "Loaded",
    "ModelConfig",
    "PaddedCache",
    "PagedCache",
    "Pages",
    "Policy",
    "Protection",
    "Sampling",
    "Schedule",
    "Scorer",
    "bucket_length",
    "compress",
    "extend",
    "generate",
    "load",
    "nbytes",
    "observe",
    "policy",
    "policy_names",
    "prefill",
    "register",
    "stack_rows",
    "stream",
    "take_rows",
]
