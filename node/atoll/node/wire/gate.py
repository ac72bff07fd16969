"""The gate: the table of admitted members, checked before every peer-to-peer handler.

Peers exchange membership certificates in `/atoll/hello/1` (`swarm/hello.py`). The gate records each peer whose
certificate is valid. A stream is refused before a byte of it is read, and a unary call before it is parsed, unless
three things hold: the caller (as the libp2p handshake proved it) is admitted, it is not on the deny-list, and its
certificate has not expired. A restart loses the table; a peer that receives `HelloRequired` says hello again.

No I/O and no hivemind here.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

from atoll.core import protocol
from atoll.core.clock import Clock
from atoll.core.errors import HelloRequired
from atoll.core.membership import DenyList, Member, MembershipVerifier, newer_deny_list, refuse_banned
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp


class Closable(Protocol):
    """A stream or connection that the gate can end."""

    def abort(self) -> None:
        """End it now; data in transit is lost."""
        ...


class Gate:
    """Admitted members, the deny-list, this node's own membership, and the streams open to each peer."""

    def __init__(
        self, authority: MembershipVerifier, membership: pb.Signed, own_peer_id: str, deny: DenyList, clock: Clock
    ) -> None:
        self._authority = authority
        self._clock = clock
        self.own_peer_id = own_peer_id
        self._members: dict[str, Member] = {}
        self._streams: defaultdict[str, set[Closable]] = defaultdict(set)
        self._deny = deny
        self._membership = self._checked(membership)

    @property
    def membership(self) -> pb.Signed:
        """This node's own membership certificate, as it shows it to peers."""
        return self._membership

    @property
    def deny(self) -> DenyList:
        return self._deny

    def set_membership(self, membership: pb.Signed) -> None:
        """Show a renewed certificate from now on. Raises `CertificateInvalid` if it is not this node's."""
        self._membership = self._checked(membership)

    def set_deny_list(self, deny: DenyList) -> None:
        """Adopt a newer deny-list (an older one is ignored) and evict every peer on it."""
        self._deny = newer_deny_list(self._deny, deny)
        for peer_id in self._deny.peer_ids:
            self.evict(peer_id)

    def hello(self) -> dp.Hello:
        """Build the hello of this node: its protocol version and its membership."""
        return dp.Hello(protocol=protocol.ours(), membership=self._membership)

    def admit(self, peer_id: str, hello: dp.Hello) -> Member:
        """Check a hello from `peer_id` (proved by the handshake) and admit that peer. Raises `Rejected` and kin."""
        protocol.check(hello.protocol, f"peer {peer_id}")
        refuse_banned(self._deny, peer_id)
        member = self._authority.verify_membership(hello.membership, self._clock.unix(), expect_peer_id=peer_id)
        self._members[peer_id] = member
        return member

    def require(self, peer_id: str) -> Member:
        """Return the membership of an admitted peer. Raises `Banned`, `HelloRequired`."""
        refuse_banned(self._deny, peer_id)
        member = self._members.get(peer_id)
        if member is None or not member.valid_at(self._clock.unix()):
            self._members.pop(peer_id, None)
            raise HelloRequired(f"peer {peer_id} has shown no membership certificate, or it has expired")
        return member

    def is_admitted(self, peer_id: str) -> bool:
        """Return whether `require` would succeed."""
        member = self._members.get(peer_id)
        banned = peer_id in self._deny.peer_ids
        return member is not None and not banned and member.valid_at(self._clock.unix())

    def evict(self, peer_id: str) -> None:
        """Forget a member and close its streams.

        The libp2p connection remains, so that a refusal can give the reason.
        """
        self._members.pop(peer_id, None)
        for stream in self._streams.pop(peer_id, set()):
            stream.abort()

    def track_stream(self, peer_id: str, stream: Closable) -> None:
        """Remember an open stream, so that eviction closes it."""
        self._streams[peer_id].add(stream)

    def untrack_stream(self, peer_id: str, stream: Closable) -> None:
        """Forget a stream that ended."""
        streams = self._streams.get(peer_id)
        if streams is not None:
            streams.discard(stream)
            if not streams:
                del self._streams[peer_id]

    def open_streams(self, peer_id: str) -> int:
        """Count the open streams to or from `peer_id`."""
        return len(self._streams.get(peer_id, ()))

    def abort_all(self) -> None:
        """Close every open stream."""
        for peer_id in tuple(self._streams):
            for stream in self._streams.pop(peer_id):
                stream.abort()

    def _checked(self, membership: pb.Signed) -> pb.Signed:
        self._authority.verify_membership(membership, self._clock.unix(), expect_peer_id=self.own_peer_id)
        return membership
