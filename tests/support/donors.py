"""Members that hold state, and a history that they voted for, without sockets or daemons."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
from support.memory_network import FrameInTransit, MemoryHub, MemoryNetwork

from atoll.core import protocol
from atoll.core.errors import AtollError, Unreachable
from atoll.core.frames import Frame, FrameKind
from atoll.core.identity import Identity
from atoll.core.manifest import Head, sign_vote
from atoll.core.plan import Assignment, Base, Plan
from atoll.core.quorum import COORDINATOR, Ballot, next_seats
from atoll.core.round_id import RoundId
from atoll.node.state.anchor import AnchorState
from atoll.node.state.fetch import FetchPolicy
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.state_server import StateServer
from atoll.v1 import manifest_pb2

ANN, BOB, CLEO, DAN, EVE, FAY = (Identity.generate() for _ in range(6))
OPERATOR = Identity.generate()
OFFSETS = (0, 40, 100, 100, 164)  # the third layer has no parameters of its own
QUICK = FetchPolicy(
    chunk_elements=16,
    max_requests_in_flight=4,
    slow_after=timedelta(milliseconds=40),
    answer_timeout=timedelta(milliseconds=200),
    max_failures=3,
    pause=timedelta(milliseconds=1),
)


def state_of(value: float) -> AnchorState:
    """Every element differs, so that a chunk in the wrong place is a wrong chunk."""
    state = AnchorState(torch.arange(float(OFFSETS[-1])) + value, OFFSETS)
    state.momentum_E = torch.arange(float(OFFSETS[-1])) / 2 + value
    return state


def commit(
    state: AnchorState,
    number: int,
    voters: list[Identity],
    *,
    after: Head | None = None,
    present: list[Identity] | None = None,
    plan_version: int = 1,
    epoch: int = 1,
    layers: Sequence[manifest_pb2.LayerState] = (),
) -> Head:
    """A manifest of `state`, signed by `voters`; `OPERATOR` as a voter is the coordinator.

    All of `present`, which are the voters unless given, have seats.
    """
    if present is None:
        present = [voter for voter in voters if voter is not OPERATOR]
    peers = [member.peer_id for member in present]
    seats = next_seats(peers, peers, ()) if peers else ()
    manifest = manifest_pb2.Manifest(
        protocol=protocol.ours(),
        round=RoundId("r", plan_version, 0, number, 0).to_proto(),
        previous_hash=after.hash if after else b"",
        contributions=[manifest_pb2.Contribution(peer_id=peer, present=True) for peer in peers],
        layers=layers or state.layer_states(number),
        seats=[peers.index(peer) for peer in seats if peer != COORDINATOR],
        coordinator_seat=COORDINATOR in seats,
        epoch=epoch,
    )
    payload, ballot = manifest.SerializeToString(), Ballot(plan_version, 0)
    committed = manifest_pb2.CommittedManifest(
        payload=payload,
        signatures=[sign_vote(voter, payload, ballot) for voter in voters],
        ballot_plan_version=plan_version,
    )
    return Head(committed)


GENESIS = commit(state_of(0.0), 0, [])


def history(*rounds: Head) -> list[Head]:
    return [GENESIS, *rounds]


def plan_of(*members: Identity, version: int = 1, base: Head = GENESIS, seats: Sequence[Identity] = ()) -> Plan:
    """A plan whose base is `base`. `seats` (all members unless given) decide the round after it."""
    peers = sorted(member.peer_id for member in members)
    deciding = [member.peer_id for member in seats or members]
    since = version if base is not GENESIS or version > 1 else 1
    return Plan(
        "r",
        version,
        tuple(Assignment(peer, 0, 3, (), 10_000, 1) for peer in peers),
        tuple((peer,) for peer in peers),
        Base(base.hash, next_seats(deciding, deciding, ()), base.round, since),
    )


@dataclass
class DonorState:
    """What one member serves; tests change it while it is served."""

    store: ManifestStore
    head: Head | None = None
    state: AnchorState | None = None
    moving: bool = False

    def hold(self, head: Head | None, state: AnchorState | None) -> None:
        self.head, self.state = head, state
        if head is not None:
            self.store.append(head)

    def current(self) -> tuple[Head, AnchorState] | None:
        return (self.head, self.state) if self.head and self.state and not self.moving else None


Behaviour = Callable[[Frame], Awaitable[Frame | AtollError | None]]


@dataclass
class DonorSwarm:
    """Members in memory. `behaviours` may change every body that a member sends; `bodies` counts them."""

    directory: Path
    us: Identity = CLEO
    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    bodies: dict[str, int] = field(default_factory=dict)
    networks: dict[str, MemoryNetwork] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hub = MemoryHub(self._pass)
        self.network = self.hub.join(self.us.peer_id)

    def serve(self, member: Identity, heads: list[Head], state: AnchorState | None) -> DonorState:
        """Have `member` hold a history, its last head with `state`."""
        store = ManifestStore(self.directory / member.peer_id, "r")
        for head in heads:
            store.append(head)
        holding = DonorState(store, heads[-1] if heads else None, state)
        network = self.networks[member.peer_id] = self.hub.join(member.peer_id)
        StateServer(network, "r", store, holding.current)
        return holding

    async def _pass(self, passage: FrameInTransit) -> Frame | AtollError | None:
        if passage.frame.kind is not FrameKind.BODY:
            return passage.frame
        self.bodies[passage.sender] = self.bodies.get(passage.sender, 0) + 1
        behaviour = self.behaviours.get(passage.sender)
        return await behaviour(passage.frame) if behaviour else passage.frame


def wrong(frame: Frame) -> Frame:
    return Frame(frame.kind, frame.header, bytes(byte ^ 1 for byte in bytes(frame.body)))


async def lies(frame: Frame) -> Frame:
    """Wrong bytes, always."""
    return wrong(frame)


async def cuts_short(frame: Frame) -> Frame:
    return Frame(frame.kind, frame.header, bytes(frame.body)[:-4])


async def is_silent(frame: Frame) -> None:
    return None


async def dies(frame: Frame) -> AtollError:
    return Unreachable("gone")


async def freezes(frame: Frame) -> None:
    """Nothing comes any more, and no stream ends."""
    await asyncio.Event().wait()


def after(count: int, behaviour: Behaviour) -> Behaviour:
    """Honest for `count` frames, then that."""
    left = count

    async def behave(frame: Frame) -> Frame | AtollError | None:
        nonlocal left
        left -= 1
        return frame if left >= 0 else await behaviour(frame)

    return behave
