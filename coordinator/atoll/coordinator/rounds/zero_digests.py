"""Digests of layers whose outer momentum is zero, as it is in every genesis.

A layer may have gigabytes, so its digest is computed in a thread, before the step that compares it. Layers of equal
size share a digest. All sizes share one pass over zeros, up to the largest layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

from atoll.coordinator.rounds.round_checks import MAX_LAYER_PARAMETERS
from atoll.v1 import plan_pb2

ZeroDigests = Mapping[int, bytes]  # SHA-256 of a layer's fp32 zeros, by its number of parameters

_FP32_BYTES = 4
_ZEROS = bytes(4 << 20)


def zero_digests(sizes: Iterable[int], stopped: Callable[[], bool] = lambda: False) -> dict[int, bytes]:
    """The digests of layers with these numbers of parameters. Blocks. If `stopped`, it returns fewer digests."""
    whole, hashed = hashlib.sha256(), 0
    found: dict[int, bytes] = {}
    for size in sorted(set(sizes)):
        while left := size * _FP32_BYTES - hashed:
            if stopped():
                return found
            part = memoryview(_ZEROS)[:left]
            whole.update(part)
            hashed += len(part)
        found[size] = whole.digest()
    return found


def sizes_to_hash(table: plan_pb2.LayerTable) -> set[int]:
    """Sizes of the layers of an unchecked table; none if one layer exceeds the limit."""
    sizes = {row.parameters for row in table.layers}
    return sizes if max(sizes, default=0) <= MAX_LAYER_PARAMETERS else set()
