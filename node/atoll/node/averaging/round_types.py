"""What goes into the round machine and what comes out of it: plain data, no behaviour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.core.round_id import RoundId
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2


@dataclass(frozen=True)
class RoundPolicy:
    """What every member knows before the first round: from the run spec and the layer table."""

    run_id: str
    fragment: int
    layers: int
    elements: int  # of the flat vector
    part_elements: int
    codec: str
    due_tokens: Callable[[int, int], int]  # (committed tokens, members) → tokens since the head that make a round due
    round_max: timedelta
    stop_tokens: int
    minimum_lease: int  # samples that a member holds at least after a commit
    ready_timeout: timedelta = timedelta(seconds=15)  # Open → every Ready: includes the rest of an inner step
    exchange_timeout: timedelta = timedelta(seconds=60)
    decision_timeout: timedelta = timedelta(seconds=15)  # Digest → Commit
    open_timeout: timedelta = timedelta(seconds=5)  # after which the next in the order opens
    report_interval: timedelta = timedelta(seconds=1)


# --- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanReceived:
    """A verified plan. The machine adopts it as soon as no round is in the way."""

    plan: Plan


@dataclass(frozen=True)
class HeadMoved:
    """State was fetched from others: this node now stands at `head`."""

    head: Head


@dataclass(frozen=True)
class Progress:
    """Tokens that this node trained since its head."""

    tokens: int


@dataclass(frozen=True)
class Received:
    """A message from an authenticated member."""

    peer: str
    message: dp.RoundMessage


@dataclass(frozen=True)
class Frozen:
    """The trainer froze its pseudo-gradient for `round_id`."""

    round_id: RoundId
    tokens: int
    samples: int


@dataclass(frozen=True)
class Exchanged:
    """The exchange finished and the outer step is staged, with these digests."""

    round_id: RoundId
    layers: tuple[manifest_pb2.LayerState, ...]


@dataclass(frozen=True)
class Failed:
    """Freezing or exchanging failed here."""

    round_id: RoundId
    reason: str


@dataclass(frozen=True)
class Resolved:
    """What the others know of a round in doubt: its manifest, or None when nobody has it."""

    round_id: RoundId
    manifest: manifest_pb2.CommittedManifest | None


@dataclass(frozen=True)
class Tick:
    """Time passed."""


Event = PlanReceived | HeadMoved | Progress | Received | Frozen | Exchanged | Failed | Resolved | Tick

# --- actions -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Deliver a message to another member, in order, with a deadline."""

    peer: str
    message: dp.RoundMessage


@dataclass(frozen=True)
class Freeze:
    """Ask the trainer for a snapshot; answer with `Frozen` or `Failed`."""

    round_id: RoundId


@dataclass(frozen=True)
class RunExchange:
    """All-reduce the frozen pseudo-gradients, stage the outer step; answer with `Exchanged` or `Failed`."""

    round_id: RoundId
    start: dp.Start


@dataclass(frozen=True)
class Release:
    """The round is over without a commit: stop its exchange, drop what is staged, keep all progress."""

    round_id: RoundId


@dataclass(frozen=True)
class Install:
    """The round is committed: the staged state becomes the anchor."""

    round_id: RoundId
    head: Head
    opened_here: bool  # this node opened the round, so it reports and evaluates


@dataclass(frozen=True)
class Resolve:
    """Ask `peers` for the manifest of a round in doubt; answer with `Resolved`."""

    round_id: RoundId
    peers: tuple[str, ...]


@dataclass(frozen=True)
class CatchUp:
    """Others are ahead: fetch their head; answer with `HeadMoved`."""

    reason: str


@dataclass(frozen=True)
class Report:
    """How a round that this node opened ended, for the round log."""

    round_id: RoundId
    manifest: manifest_pb2.CommittedManifest | None
    reason: str
    seconds: float


Action = Send | Freeze | RunExchange | Release | Install | Resolve | CatchUp | Report
