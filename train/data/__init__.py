"""What training reads: sources of tokens, mixed and packed into batches that can be resumed.

Grain and pyarrow are imported when they are used.
"""

from train.data.config import (
    ChatConfig,
    ErasedConfig,
    SourceConfig,
    TaskConfig,
    TextConfig,
    mapping,
    read,
)
from train.data.pipeline import Batch, Batches, build, open_source
from train.data.shards import Shards

__all__ = [
    # What to read
    "ChatConfig",
    "ErasedConfig",
    "SourceConfig",
    "TaskConfig",
    "TextConfig",
    "mapping",
    "read",
    # Reading it
    "Batch",
    "Batches",
    "Shards",
    "build",
    "open_source",
]
