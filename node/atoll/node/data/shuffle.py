"""Permutations that depend on a seed and a name only, not on library versions, the machine or the number of processes.

Items are sorted by pseudo-random keys. The keys are Philox4x64-10 in counter mode (Salmon et al. 2011, "Parallel Random
Numbers: As Easy as 1, 2, 3"); NumPy guarantees the stream of its bit generators, and not that of `permutation`.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def permutation(count: int, seed: int, *names: str | int) -> NDArray[np.int64]:
    """Return the numbers `0 … count - 1` in an order that only `seed` and `names` determine."""
    text = "\0".join(str(part) for part in (seed, *names)).encode()
    key = np.frombuffer(hashlib.sha256(b"atoll shuffle\0" + text).digest()[:16], dtype="<u8")
    keys = np.random.Philox(key=key.astype(np.uint64)).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)
