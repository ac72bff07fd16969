"""What the round engine calls when something happens, and its counters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.core.manifest import Head
from atoll.core.round_id import RoundId
from atoll.v1 import common_pb2 as pb
from atoll.v1 import membership_pb2 as mb

if TYPE_CHECKING:  # the counters are part of a seed's status, and a seed has no torch
    from atoll.node.rounds import types as rt


@dataclass
class RoundCounters:
    """Counters and times of this process's rounds."""

    joined: int = 0  # exchanges started
    committed: int = 0
    witnessed: int = 0  # committed by the holders of layers that are not held here
    abandoned: int = 0
    left_out: int = 0  # committed rounds in which screening left our update out of some sums
    bytes_fp32: int = 0  # bytes that the joined exchanges would have sent in fp32
    exchange_seconds: float = 0.0  # of the exchanges that ended
    update_norm: float = 0.0  # L2 norm of the pseudo-gradient of the last exchange, of its fragment; 0: none yet


@dataclass(frozen=True)
class RoundCallbacks:
    """Receivers of the engine's events. Called in the event loop; must not block."""

    committed: Callable[[Head], None]
    report: Callable[[mb.RoundReport], None]
    evaluated: Callable[[mb.EvaluationReport], None]
    audited: Callable[[mb.TrainingAudit], None]
    ask_coordinator: Callable[[RoundId, bytes], Awaitable[rt.CoordinatorVote]]
    plan_newer_than: Callable[[int], pb.Signed | None]  # the sealed plan, if ours is newer than that version
    plan_shared: Callable[[pb.Signed], None]  # by a member: verify and take it
