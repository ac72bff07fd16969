"""Measured paths between members, as the members report them: bounded and smoothed. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from atoll.coordinator.planner.question import PathMeasurement
from atoll.coordinator.sanitize import MAX_NAME_CHARACTERS, clean, sanitized_message
from atoll.v1 import membership_pb2 as mb

MAX_PATHS = 64  # of one node
STALE_SECONDS = 600.0  # older measurements are dropped
NEW_SAMPLE_WEIGHT = 0.3  # in the exponential average of round-trip times
_MAX_RTT_SECONDS = 60.0
_MAX_LAYER_KINDS = 16


def merge_reported_paths(
    before: Mapping[str, PathMeasurement], reported: Iterable[mb.PeerPath], members: Collection[str], now: float
) -> Mapping[str, PathMeasurement]:
    """Paths after a heartbeat. Ignores values out of range and paths to peers outside `members`."""
    known = recent_paths(before, now)
    for path in islice(reported, MAX_PATHS):
        finite = math.isfinite(path.rtt_seconds) and math.isfinite(path.bytes_per_second)
        if (
            not finite
            or not 0 < path.rtt_seconds <= _MAX_RTT_SECONDS
            or path.bytes_per_second < 0
            or path.peer_id not in members
        ):
            continue
        if path.peer_id in known or len(known) < MAX_PATHS:
            known[path.peer_id] = _smoothed(known.get(path.peer_id), path, now)
    return known


def recent_paths(paths: Mapping[str, PathMeasurement], now: float) -> dict[str, PathMeasurement]:
    """Paths measured within `STALE_SECONDS`."""
    return {peer: path for peer, path in paths.items() if now - path.at < STALE_SECONDS}


def _smoothed(old: PathMeasurement | None, new: mb.PeerPath, now: float) -> PathMeasurement:
    rtt = new.rtt_seconds if old is None else old.rtt_seconds + NEW_SAMPLE_WEIGHT * (new.rtt_seconds - old.rtt_seconds)
    return PathMeasurement(rtt, new.bytes_per_second, now)


def sanitized_profile(profile: mb.NodeProfile) -> mb.NodeProfile:
    """A copy of a profile with clean texts, finite values from 0 on, and at most 16 different layer kinds."""
    kept = sanitized_message(profile)
    del kept.layer_times[:]
    kinds: set[str] = set()
    for time in profile.layer_times[:_MAX_LAYER_KINDS]:
        cleaned = sanitized_message(time, MAX_NAME_CHARACTERS)
        if clean(cleaned.kind) and cleaned.kind not in kinds:
            kinds.add(cleaned.kind)
            kept.layer_times.append(cleaned)
    return kept
