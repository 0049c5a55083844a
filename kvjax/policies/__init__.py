"""Eviction policies: one file per method, and the pieces they are composed of."""

from kvjax.policies.base import (
    Allocator,
    Policy,
    Protection,
    Remainder,
    Schedule,
    Scorer,
    StateField,
    Uniform,
)
from kvjax.policies.observation import Observation, State
from kvjax.policies.registry import describe, options, policy, policy_names, register

# The methods: importing a file registers its names.
from kvjax.policies import (  # isort: skip
    chunkkv,
    compactor,
    duoattention,
    h2o,
    keydiff,
    knorm,
    lagkv,
    leverage,
    pyramidkv,
    qfilters,
    random,
    rkv,
    snapkv,
    streaming,
    tova,
)

__all__ = [
    "Allocator",
    "Observation",
    "Policy",
    "Protection",
    "Remainder",
    "Schedule",
    "Scorer",
    "State",
    "StateField",
    "Uniform",
    "chunkkv",
    "compactor",
    "describe",
    "duoattention",
    "h2o",
    "keydiff",
    "knorm",
    "lagkv",
    "leverage",
    "options",
    "policy",
    "policy_names",
    "pyramidkv",
    "qfilters",
    "random",
    "register",
    "rkv",
    "snapkv",
    "streaming",
    "tova",
]
