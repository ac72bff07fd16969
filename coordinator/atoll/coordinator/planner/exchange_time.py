"""Time that an outer round's exchange keeps each holder's link busy: `reduce_shares.py` for many layers at once. Pure.

The R holders of a layer average it among themselves. A holder that reduces a share s of V bytes sends and receives
(1 + s·(R − 2))·V bytes. `reduce_shares.best_shares` raises all shares to a common *level*: the seconds per byte after
which all reducers are done. A holder that needs longer for its own values alone reduces nothing. A fast holder gets at
most twice an equal share. This module computes the same level for all layers together, as arrays, because a plan for a
thousand machines has hundreds of routes.
"""

from __future__ import annotations

import numpy as np

from atoll.coordinator.planner.problem import BoolArray, FloatArray
from atoll.coordinator.planner.reduce_shares import MAX_SHARE_FACTOR, MIN_LINK_BYTES_PER_SECOND

_RELATIVE_TOLERANCE = 1e-9  # of a vector: rounding error


def finish_seconds_per_byte(rates: FloatArray, dialable: BoolArray) -> FloatArray:
    """Seconds per byte until all reducers are done, [S].

    `rates` [S, R]: bytes per second of the R holders of S layers; `dialable` [S, R]: holders that can reduce, at
    least one per layer.
    """
    holders = rates.shape[1]
    if holders < 3:
        return np.zeros(len(rates))
    starts = np.where(dialable, 1 / rates, np.inf)
    ends = np.where(dialable, (1 + largest_shares(dialable) * (holders - 2)) / rates, np.inf)
    slopes = np.where(dialable, rates / (holders - 2), 0.0)
    points = np.concatenate([starts, ends], axis=1)
    order = points.argsort(axis=1, kind="stable")
    points = np.take_along_axis(points, order, axis=1)
    slope = np.take_along_axis(np.concatenate([slopes, -slopes], axis=1), order, axis=1).cumsum(axis=1)
    with np.errstate(invalid="ignore"):
        steps = np.nan_to_num(np.diff(points, axis=1), posinf=0.0) * slope[:, :-1]
    filled = np.concatenate([np.zeros((len(rates), 1)), steps.cumsum(axis=1)], axis=1)  # share reduced by each point
    whole = np.minimum(1.0, filled.max(axis=1, keepdims=True)) - _RELATIVE_TOLERANCE
    last = np.argmax(filled >= whole, axis=1)  # the first point by which the whole vector has reducers
    each = np.arange(len(rates))
    before = np.maximum(last - 1, 0)
    missing = 1 - filled[each, before]
    return np.asarray(points[each, before] + missing / np.maximum(slope[each, before], 1e-300))


def largest_shares(dialable: BoolArray) -> FloatArray:
    """Largest share that a holder of each layer may have, [S, 1]."""
    return np.asarray(np.maximum(MAX_SHARE_FACTOR / dialable.shape[1], 1 / dialable.sum(axis=1, keepdims=True)))


def link_seconds_per_byte(
    level: FloatArray, rate: FloatArray, reduces: BoolArray, largest: FloatArray, holders: int
) -> FloatArray:
    """Seconds per byte that a holder's own link is busy at this level; all arrays have the same shape."""
    alone = 1 / rate
    if holders < 3:
        return alone
    return np.where(reduces, np.minimum(np.maximum(alone, level), (1 + largest * (holders - 2)) / rate), alone)


def reducer_mask(dialable: BoolArray) -> BoolArray:
    """Holders that others can dial; all holders of a layer if none can be dialled, [S, R]."""
    return dialable | ~dialable.any(axis=1, keepdims=True)


def link_rates(uplink: FloatArray, downlink: FloatArray) -> FloatArray:
    """Rate of the slower direction, as equal bytes go in and out; at least `MIN_LINK_BYTES_PER_SECOND`."""
    return np.maximum(np.minimum(uplink, downlink), MIN_LINK_BYTES_PER_SECOND)
