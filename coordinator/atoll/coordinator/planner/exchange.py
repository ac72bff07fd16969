"""How long an outer round's exchange keeps every holder's link busy: `shares.py` for many layers at once. Pure.

Holders of a layer average it among themselves; who reduces a share s of V bytes sends and receives (1 + s·(R − 2))·V,
with R holders. `shares.best_shares` finds the shares with which that ends first; here the same is found for all layers
together, as arrays, because a plan of a thousand machines has as many layers as it has routes.
"""

from __future__ import annotations

import numpy as np

from atoll.coordinator.planner.problem import BoolArray, FloatArray
from atoll.coordinator.planner.shares import LEAST, MOST


def seconds_per_byte(rates: FloatArray, dialled: BoolArray) -> FloatArray:
    """Seconds that each byte of a layer takes until its last holder is done, [S].

    `rates` [S, R]: bytes per second of the R holders of S layers; `dialled` [S, R]: who can reduce.
    """
    holders = rates.shape[1]
    rates = np.maximum(rates, LEAST)
    reduces = dialled | ~dialled.any(axis=1, keepdims=True)
    if holders < 2:
        return np.zeros(len(rates))
    slowest = np.asarray((1 / rates).max(axis=1))  # everybody sends its own values
    if holders == 2:
        return slowest
    most = np.where(reduces, np.maximum(MOST / holders, 1 / reduces.sum(axis=1, keepdims=True)), 0.0)
    enough = np.clip((slowest[:, None] * rates - 1) / (holders - 2), 0.0, most).sum(axis=1) >= 1
    return np.where(enough, slowest, _filled(rates, reduces, most))


def _filled(rates: FloatArray, reduces: BoolArray, most: FloatArray) -> FloatArray:
    """Seconds per byte where all who reduce do reduce something, [S]; from below, capping who has its most."""
    spare = rates.shape[1] - 2
    at_most = np.where(reduces, (1 + most * spare) / rates, 0.0)  # when who has its most is done
    free = reduces.copy()
    while True:
        left = 1 - np.where(free, 0.0, most).sum(axis=1)
        speed = (rates * free).sum(axis=1)
        shared = np.where(speed > 0, (left * spare + free.sum(axis=1)) / np.maximum(speed, LEAST), 0.0)
        seconds = np.maximum(shared, np.where(free, 0.0, at_most).max(axis=1))
        capped = free & (at_most < shared[:, None])
        if not capped.any():
            return np.asarray(seconds)
        free &= ~capped
