"""Plans: signed by the operator, checked by whoever follows them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from google.protobuf.message import DecodeError

from atoll.core import protocol
from atoll.core.errors import SignatureInvalid
from atoll.core.identity import Identity, verify_signed
from atoll.core.manifest import Head
from atoll.core.quorum import Electorate
from atoll.v1 import common_pb2 as pb
from atoll.v1 import plan_pb2

SampleRange = tuple[int, int]
RouteName = tuple[int, int]  # the plan that it began under, and its number there


@dataclass(frozen=True)
class Assignment:
    """What one node does: the layers it holds, the samples it starts with, what it may claim."""

    peer_id: str
    first_layer: int
    last_layer: int  # inclusive
    data_ranges: tuple[SampleRange, ...]
    max_round_tokens: int
    max_reduce_bytes_per_second: int


@dataclass(frozen=True)
class Base:
    """Where the history that counts begins: genesis, or where an operator made the run go on."""

    manifest_hash: bytes
    voters: tuple[str, ...]  # peer ids, ordered: who decides the round after it
    round: int = 0
    since_version: int = 1  # the plan that set it


@dataclass(frozen=True)
class Plan:
    """A verified plan. Assignments are ordered by peer id."""

    run_id: str
    version: int
    assignments: tuple[Assignment, ...]
    routes: tuple[tuple[str, ...], ...]
    base: Base
    issued_unix_ms: int = 0
    reason: str = ""
    former: tuple[str, ...] = ()  # peer ids: no members any more; may hold state that members lack
    names: tuple[RouteName, ...] = ()  # of the routes, in their order; none: all begin with this plan

    def name_of(self, number: int) -> RouteName:
        """What messages call a route, by its place in `routes`: the same as long as plans leave it as it is."""
        return self.names[number] if self.names else (self.version, number)

    @cached_property
    def members(self) -> tuple[str, ...]:
        """Peer ids, ordered."""
        return tuple(item.peer_id for item in self.assignments)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """First layers of spans but the model's first, ordered: layers on both sides may have other holders."""
        return tuple(sorted({item.first_layer for item in self.assignments} - {0}))

    @cached_property
    def drivers(self) -> tuple[str, ...]:
        """Who consumes data: the first stage of every route. Peer ids, ordered."""
        return tuple(sorted(route[0] for route in self.routes))

    @cached_property
    def stages(self) -> frozenset[str]:
        """Members that have a place on a route."""
        return frozenset(peer for route in self.routes for peer in route)

    @cached_property
    def standbys(self) -> tuple[str, ...]:
        """Members without such a place: they hold layers, follow the rounds, and may take a stage's place. Ordered."""
        return tuple(peer for peer in self.members if peer not in self.stages)

    def span(self, peer_id: str) -> range:
        """The layers that `peer_id` holds; none when it is not part of this plan."""
        assignment = self.assignment(peer_id)
        return range(assignment.first_layer, assignment.last_layer + 1) if assignment else range(0)

    @property
    def layers(self) -> int:
        """How many the model has; 0 in a plan without members."""
        return max((item.last_layer + 1 for item in self.assignments), default=0)

    def is_replica(self, peer_id: str) -> bool:
        """Whether it holds the whole model: a route of its own."""
        return (peer_id,) in self.routes

    def holders(self, layers: range) -> frozenset[str]:
        """Members that hold all of these consecutive layers."""
        return frozenset(
            item.peer_id
            for item in self.assignments
            if item.first_layer <= layers.start and layers.stop <= item.last_layer + 1
        )

    def accepts(self, head: Head) -> bool:
        """Whether `head` can be part of the history that counts: the base, or made since under its plans."""
        if head.round <= self.base.round:
            return head.hash == self.base.manifest_hash
        return head.manifest.round.plan_version >= self.base.since_version

    def electorate(self, head: Head) -> Electorate:
        """Who decides the round after `head`."""
        return self._first_electorate if head.hash == self.base.manifest_hash else head.electorate

    def can_decide(self, head: Head) -> bool:
        """Whether its members suffice to commit the round after `head`, if need be with the coordinator's vote."""
        electorate, members = self.electorate(head), frozenset(self.members)
        return electorate.decides(members) or electorate.is_half(members)

    @cached_property
    def _first_electorate(self) -> Electorate:
        return Electorate(frozenset(self.base.voters))

    def assignment(self, peer_id: str) -> Assignment | None:
        """What `peer_id` does, or None when it is not part of this plan."""
        return self._by_peer.get(peer_id)

    @cached_property
    def _by_peer(self) -> dict[str, Assignment]:
        return {item.peer_id: item for item in self.assignments}

    def to_proto(self) -> plan_pb2.Plan:
        """The message that is signed."""
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
                voters=self.base.voters,
            ),
            issued_unix_ms=self.issued_unix_ms,
            reason=self.reason,
            former=self.former,
        )

    @classmethod
    def from_proto(cls, message: plan_pb2.Plan) -> Plan:
        """Read a plan whose signature was checked."""
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
                )
                for item in message.assignments
            ),
            routes=tuple(tuple(route.peer_ids) for route in message.routes),
            base=Base(
                manifest_hash=message.base.manifest_hash,
                voters=tuple(message.base.voters),
                round=message.base.round,
                since_version=message.base.since_version,
            ),
            issued_unix_ms=message.issued_unix_ms,
            reason=message.reason,
            former=tuple(message.former),
            names=stored_route_names(message.version, names),
        )


def stored_route_names(version: int, names: tuple[RouteName, ...]) -> tuple[RouteName, ...]:
    """Names as a plan has them: none where all its routes begin with it, or where an older coordinator gave none."""
    fresh = all(name == (version, number) for number, name in enumerate(names))
    return names if all(since for since, _ in names) and not fresh else ()


def sign_plan(operator: Identity, plan: Plan) -> pb.Signed:
    """Seal a plan for members."""
    return operator.sign_message("plan", plan.to_proto().SerializeToString(deterministic=True))


def verify_plan(sealed: pb.Signed, operator_key: bytes, run_id: str) -> Plan:
    """Check signature, version of the protocol, run. Raises `SignatureInvalid`, `ProtocolMismatch`."""
    try:
        message = plan_pb2.Plan.FromString(verify_signed("plan", sealed, operator_key))
    except DecodeError as error:
        raise SignatureInvalid("the plan does not parse") from error
    protocol.check(message.protocol, "the coordinator")
    if message.run_id != run_id:
        raise SignatureInvalid(f"the plan is for run {message.run_id!r}, not {run_id!r}")
    return Plan.from_proto(message)
