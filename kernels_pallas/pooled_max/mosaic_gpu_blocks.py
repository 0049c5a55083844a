"""How the GPU kernel of the pooled maximum divides its work."""

from __future__ import annotations

import dataclasses

HELD = 64  # keys of a warpgroup: rows of a wgmma
WARPGROUPS = 2  # that compute
_PROCESSORS = 132  # of an H100 or H200
_SHARED_BYTES = 200 * 1024  # of the 227 KiB, for keys and queries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Queries of a tile, tiles in flight, and parts of a block of keys' queries."""

    queries: int = 64
    stages: int
    splits: int


def choose(tiles: int, length: int, bytes_per_token: int, streamed: bool) -> Blocks:
    """For `tiles` blocks of keys that `length` queries see; keys are `streamed` or stay."""
    queries = 64
    held = 0 if streamed else HELD * WARPGROUPS * bytes_per_token
    stage = (queries + (HELD * WARPGROUPS if streamed else 0)) * bytes_per_token
    stages = min(4, (_SHARED_BYTES - held) // stage)
    if stages < 1:
        raise NotImplementedError(
            f"a head takes {bytes_per_token} bytes per token: at most "
            f"{_SHARED_BYTES // (queries + HELD * WARPGROUPS)} are served"
        )
    most = -(-length // queries)
    splits = max(1, min(2 * _PROCESSORS // tiles, most, 8))
    return Blocks(queries=queries, stages=stages, splits=splits)
