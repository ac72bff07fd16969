"""What members measured of the paths between them. Pure: words of others, bounded and smoothed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from atoll.coordinator.planner.question import PathMeasurement
from atoll.coordinator.sanitize import MAX_NAME_CHARACTERS, clean, sanitized_message
from atoll.v1 import membership_pb2 as mb

MAX_PATHS = 64  # that one node's word is kept about
STALE_SECONDS = 600.0  # after which a figure is no measurement any more
NEW_SAMPLE_WEIGHT = 0.3  # the weight of a new figure beside the old ones
_MAX_RTT_SECONDS = 60.0  # seconds
_MAX_LAYER_KINDS = 16


def take(
    before: Mapping[str, PathMeasurement], told: Iterable[mb.PeerPath], others: Collection[str], now: float
) -> Mapping[str, PathMeasurement]:
    """What is known after a heartbeat. Figures that cannot be, and those about strangers, are passed over."""
    known = fresh(before, now)
    for path in islice(told, MAX_PATHS):
        real = math.isfinite(path.rtt_seconds) and math.isfinite(path.bytes_per_second)
        if (
            not real
            or not 0 < path.rtt_seconds <= _MAX_RTT_SECONDS
            or path.bytes_per_second < 0
            or path.peer_id not in others
        ):
            continue
        if path.peer_id in known or len(known) < MAX_PATHS:
            known[path.peer_id] = _smoothed(known.get(path.peer_id), path, now)
    return known


def fresh(paths: Mapping[str, PathMeasurement], now: float) -> dict[str, PathMeasurement]:
    """Those that were measured lately."""
    return {peer: path for peer, path in paths.items() if now - path.at < STALE_SECONDS}


def _smoothed(old: PathMeasurement | None, new: mb.PeerPath, now: float) -> PathMeasurement:
    rtt = new.rtt_seconds if old is None else old.rtt_seconds + NEW_SAMPLE_WEIGHT * (new.rtt_seconds - old.rtt_seconds)
    return PathMeasurement(rtt, new.bytes_per_second, now)


def sanitized_profile(profile: mb.NodeProfile) -> mb.NodeProfile:
    """As we keep it: clean words, finite figures from 0 on, a few kinds of layers with names of their own."""
    kept = sanitized_message(profile)
    del kept.layer_times[:]
    kinds: set[str] = set()
    for time in profile.layer_times[:_MAX_LAYER_KINDS]:
        tidy = sanitized_message(time, MAX_NAME_CHARACTERS)
        if clean(tidy.kind) and tidy.kind not in kinds:
            kinds.add(tidy.kind)
            kept.layer_times.append(tidy)
    return kept
