"""Plans: which node holds which layers, signed by the operator and verified by every node.

A plan assigns a span of layers to each member, orders members into routes that cover all layers once, and names the
base of the run's history: the manifest that the rounds under it build on. A member without a place on a route is a
standby. Nodes follow the verified plan with the highest version.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

from google.protobuf.message import DecodeError

from atoll.core import protocol
from atoll.core.data_position import SampleRange
from atoll.core.errors import SignatureInvalid
from atoll.core.identity import Identity, verify_signed
from atoll.core.manifest import Head
from atoll.core.quorum import COORDINATOR, Electorate
from atoll.v1 import common_pb2 as pb
from atoll.v1 import plan_pb2

# version of the plan in which the route began, and its number among all routes that ever began
RouteName = tuple[int, int]


@dataclass(frozen=True)
class Assignment:
    """One node's part in a plan: its layers, first data ranges and caps."""

    peer_id: str
    first_layer: int
    last_layer: int  # inclusive
    data_ranges: tuple[SampleRange, ...]
    max_round_tokens: int
    max_reduce_bytes_per_second: int
    on_probation: bool = False  # it weighs little (`core/probation.py`)


@dataclass(frozen=True)
class Base:
    """The manifest on which a run's valid history builds: genesis, or the one that the operator recovered to."""

    manifest_hash: bytes
    seats: tuple[str, ...]  # the seats of the next round, in the order of opening
    round: int = 0
    since_version: int = 1  # the plan that set it


@dataclass(frozen=True)
class Plan:
    """A verified plan. Assignments are ordered by peer id.

    It has many methods because each answers one question about the same data.
    """

    run_id: str
    version: int
    assignments: tuple[Assignment, ...]
    routes: tuple[tuple[str, ...], ...]
    base: Base
    issued_unix_ms: int = 0
    reason: str = ""
    former: tuple[str, ...] = ()  # peer ids of former members; they may hold state that members lack
    names: tuple[RouteName, ...] = ()  # by route; empty: all routes begin with this plan
    # number of routes started under this and earlier plans; a new route gets the next number; 0: not counted
    routes_begun: int = 0

    def name_of(self, number: int) -> RouteName:
        """Return the name of route `number` in messages. It stays the same while plans do not change the route."""
        return self.names[number] if self.names else (self.version, number)

    @cached_property
    def members(self) -> tuple[str, ...]:
        """Peer ids of the members, ordered."""
        return tuple(item.peer_id for item in self.assignments)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """First layers of all spans except layer 0, ordered. The holders of the layers on both sides may differ."""
        return tuple(sorted({item.first_layer for item in self.assignments} - {0}))

    @cached_property
    def drivers(self) -> tuple[str, ...]:
        """Peer ids of the first stage of every route, ordered. Only drivers consume data."""
        return tuple(sorted(route[0] for route in self.routes))

    @cached_property
    def stages(self) -> frozenset[str]:
        """Peer ids of the members on a route."""
        return frozenset(peer for route in self.routes for peer in route)

    @cached_property
    def standbys(self) -> tuple[str, ...]:
        """Peer ids of the members on no route, ordered. They hold layers, follow rounds and can replace a stage."""
        return tuple(peer for peer in self.members if peer not in self.stages)

    def span(self, peer_id: str) -> range:
        """Return the layers that `peer_id` holds; empty if it is not a member."""
        assignment = self.assignment(peer_id)
        return range(assignment.first_layer, assignment.last_layer + 1) if assignment else range(0)

    @property
    def layers(self) -> int:
        """Number of layers of the model; 0 in a plan without members."""
        return max((item.last_layer + 1 for item in self.assignments), default=0)

    def is_replica(self, peer_id: str) -> bool:
        """Return whether `peer_id` is a route by itself, so it holds the whole model."""
        return (peer_id,) in self.routes

    def holders(self, layers: range) -> frozenset[str]:
        """Return the members that hold all of these consecutive layers."""
        return frozenset(
            item.peer_id
            for item in self.assignments
            if item.first_layer <= layers.start and layers.stop <= item.last_layer + 1
        )

    def accepts(self, head: Head) -> bool:
        """Return whether `head` is in the valid history: the base, or a later round of its epoch.

        A manifest has the epoch of its plan, and builds only on a head of that epoch or on the base. So rounds that a
        recovery made void stay void, and so do all rounds that build on them.
        """
        if head.round <= self.base.round:
            return head.hash == self.base.manifest_hash
        return head.manifest.epoch == self.base.since_version

    def seats(self, head: Head) -> tuple[str, ...]:
        """Return the seats that decide the round after `head`, in the order of opening."""
        return self.base.seats if head.hash == self.base.manifest_hash else head.seats

    def openers(self, head: Head) -> tuple[str, ...]:
        """Return the members that may open the round after `head`, in order.

        Attempt k is opened by the k-th, modulo their number.
        """
        return tuple(peer for peer in self.seats(head) if peer in self._by_peer)

    def electorate(self, head: Head) -> Electorate:
        """Return the seats that decide the round after `head`, as a set."""
        return Electorate(frozenset(self.seats(head)))

    def can_decide(self, head: Head) -> bool:
        """Return whether its members, with the coordinator's vote if necessary, can commit the round after `head`."""
        return self.electorate(head).decides((*self.members, COORDINATOR))

    @cached_property
    def by_uplink(self) -> tuple[str, ...]:
        """Members in the order in which they get free seats: by reduce share, then by peer id."""
        ordered = sorted(self.assignments, key=lambda item: (-item.max_reduce_bytes_per_second, item.peer_id))
        return tuple(item.peer_id for item in ordered)

    @cached_property
    def on_probation(self) -> frozenset[str]:
        """Members on probation."""
        return frozenset(item.peer_id for item in self.assignments if item.on_probation)

    def without_probation(self, peers: Set[str]) -> frozenset[str]:
        """The `peers` that are not on probation. Attackers on probation may be many, so only the others count."""
        return frozenset(peers - self.on_probation)

    def assignment(self, peer_id: str) -> Assignment | None:
        """Return the assignment of `peer_id`, or None if it is not a member."""
        return self._by_peer.get(peer_id)

    @cached_property
    def _by_peer(self) -> dict[str, Assignment]:
        return {item.peer_id: item for item in self.assignments}

    def to_proto(self) -> plan_pb2.Plan:
        """Convert to the message that the operator signs."""
        return plan_pb2.Plan(
            protocol=protocol.ours(),
            run_id=self.run_id,
            version=self.version,
            assignments=[
                plan_pb2.Assignment(
                    peer_id=item.peer_id,
                    span=plan_pb2.Span(first=item.first_layer, last=item.last_layer),
                    data_ranges=[pb.SampleRange(start=start, end=end) for start, end in item.data_ranges],
                    max_round_tokens=item.max_round_tokens,
                    max_reduce_bytes_per_second=item.max_reduce_bytes_per_second,
                    on_probation=item.on_probation,
                )
                for item in self.assignments
            ],
            routes=[
                plan_pb2.Route(peer_ids=route, since_version=since, number=number)
                for route, (since, number) in zip(self.routes, map(self.name_of, range(len(self.routes))), strict=True)
            ],
            base=plan_pb2.Base(
                round=self.base.round,
                manifest_hash=self.base.manifest_hash,
                since_version=self.base.since_version,
                seats=self.base.seats,
            ),
            issued_unix_ms=self.issued_unix_ms,
            reason=self.reason,
            former=self.former,
            routes_begun=self.routes_begun,
        )

    @classmethod
    def from_proto(cls, message: plan_pb2.Plan) -> Plan:
        """Parse a plan whose signature was verified."""
        names = tuple((route.since_version, route.number) for route in message.routes)
        return cls(
            run_id=message.run_id,
            version=message.version,
            assignments=tuple(
                Assignment(
                    peer_id=item.peer_id,
                    first_layer=item.span.first,
                    last_layer=item.span.last,
                    data_ranges=tuple((piece.start, piece.end) for piece in item.data_ranges),
                    max_round_tokens=item.max_round_tokens,
                    max_reduce_bytes_per_second=item.max_reduce_bytes_per_second,
                    on_probation=item.on_probation,
                )
                for item in message.assignments
            ),
            routes=tuple(tuple(route.peer_ids) for route in message.routes),
            base=Base(
                manifest_hash=message.base.manifest_hash,
                seats=tuple(message.base.seats),
                round=message.base.round,
                since_version=message.base.since_version,
            ),
            issued_unix_ms=message.issued_unix_ms,
            reason=message.reason,
            former=tuple(message.former),
            names=stored_route_names(message.version, names),
            routes_begun=message.routes_begun,
        )


def stored_route_names(version: int, names: tuple[RouteName, ...]) -> tuple[RouteName, ...]:
    """Return `names`, or () if all routes begin with this plan or an older coordinator sent no names."""
    fresh = all(name == (version, number) for number, name in enumerate(names))
    return names if all(since for since, _ in names) and not fresh else ()


def sign_plan(operator: Identity, plan: Plan) -> pb.Signed:
    """Sign a plan with the operator's key."""
    return operator.sign_message("plan", plan.to_proto().SerializeToString(deterministic=True))


def verify_plan(signed: pb.Signed, operator_key: bytes, run_id: str) -> Plan:
    """Check signature, protocol version and run. Raises `SignatureInvalid`, `ProtocolMismatch`."""
    try:
        message = plan_pb2.Plan.FromString(verify_signed("plan", signed, operator_key))
    except DecodeError as error:
        raise SignatureInvalid("the plan does not parse") from error
    protocol.check(message.protocol, "the coordinator")
    if message.run_id != run_id:
        raise SignatureInvalid(f"the plan is for run {message.run_id!r}, not {run_id!r}")
    return Plan.from_proto(message)
