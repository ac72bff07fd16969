"""The gate: which peers may open streams, and for how long."""

from __future__ import annotations

import pytest
from support.certificates import certificate_of

from atoll.core.clock import ManualClock
from atoll.core.errors import Banned, CertificateInvalid, HelloRequired, ProtocolMismatch
from atoll.core.identity import Identity
from atoll.core.membership import EMPTY_DENY_LIST, EXPIRY_GRACE, DenyList, MembershipVerifier
from atoll.node.wire.gate import Gate
from atoll.v1 import common_pb2 as pb

OPERATOR, OWN, PEER = Identity.generate(), Identity.generate(), Identity.generate()


class FakeStream:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def certificate(identity: Identity, now: float, run_id: str = "reef") -> pb.Signed:
    return certificate_of(identity, OPERATOR, now, run_id=run_id)


def make_gate(identity: Identity, clock: ManualClock, deny: DenyList = EMPTY_DENY_LIST) -> Gate:
    authority = MembershipVerifier(OPERATOR.public_key, "reef")
    return Gate(authority, certificate(identity, clock.unix()), identity.peer_id, deny, clock)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def gate(clock: ManualClock) -> Gate:
    return make_gate(OWN, clock)


def test_a_peer_is_known_after_its_hello_only(gate: Gate, clock: ManualClock) -> None:
    with pytest.raises(HelloRequired):
        gate.require(PEER.peer_id)
    gate.admit(PEER.peer_id, make_gate(PEER, clock).hello())
    assert gate.require(PEER.peer_id).peer_id == PEER.peer_id
    assert gate.is_admitted(PEER.peer_id)


@pytest.mark.parametrize(("theirs", "known"), [(1000, True), (0, True), (2000, False)])
def test_a_member_of_a_deleted_run_of_the_same_name_is_none_of_ours(
    clock: ManualClock, theirs: int, known: bool
) -> None:
    """Certificates of releases that did not tell the time are taken."""
    authority = MembershipVerifier(OPERATOR.public_key, "reef", 1000)
    ours = certificate_of(OWN, OPERATOR, clock.unix(), created=1000)
    gate = Gate(authority, ours, OWN.peer_id, EMPTY_DENY_LIST, clock)
    hello = make_gate(PEER, clock).hello()
    hello.membership.CopyFrom(certificate_of(PEER, OPERATOR, clock.unix(), created=theirs))
    if known:
        gate.admit(PEER.peer_id, hello)
    else:
        with pytest.raises(CertificateInvalid, match="deleted run of the name 'reef'"):
            gate.admit(PEER.peer_id, hello)
    assert gate.is_admitted(PEER.peer_id) == known


def test_a_hello_must_be_the_callers_own_and_of_our_major(gate: Gate, clock: ManualClock) -> None:
    hello = make_gate(PEER, clock).hello()
    with pytest.raises(CertificateInvalid, match="sent the membership certificate of"):
        gate.admit(Identity.generate().peer_id, hello)
    hello.protocol.major += 1
    with pytest.raises(ProtocolMismatch, match="newer than ours"):
        gate.admit(PEER.peer_id, hello)
    assert not gate.is_admitted(PEER.peer_id)


def test_membership_ends_with_certificate_and_grace(gate: Gate, clock: ManualClock) -> None:
    gate.admit(PEER.peer_id, make_gate(PEER, clock).hello())
    clock.advance(24 * 3600 + EXPIRY_GRACE.total_seconds() - 1)
    assert gate.is_admitted(PEER.peer_id)
    clock.advance(2)
    with pytest.raises(HelloRequired):
        gate.require(PEER.peer_id)


def test_a_ban_cuts_streams_and_older_lists_change_nothing(gate: Gate, clock: ManualClock) -> None:
    gate.admit(PEER.peer_id, make_gate(PEER, clock).hello())
    stream = FakeStream()
    gate.track_stream(PEER.peer_id, stream)
    gate.set_deny_list(DenyList(2, frozenset({PEER.peer_id})))
    assert stream.aborted
    assert gate.open_streams(PEER.peer_id) == 0
    gate.set_deny_list(DenyList(1, frozenset()))
    with pytest.raises(Banned):
        gate.require(PEER.peer_id)
    with pytest.raises(Banned):
        gate.admit(PEER.peer_id, make_gate(PEER, clock).hello())


def test_only_our_own_certificate_replaces_ours(gate: Gate, clock: ManualClock) -> None:
    renewed = certificate(OWN, clock.unix() + 1)
    gate.set_membership(renewed)
    assert gate.hello().membership == renewed
    for wrong in (certificate(PEER, clock.unix()), certificate(OWN, clock.unix(), run_id="other")):
        with pytest.raises(CertificateInvalid):
            gate.set_membership(wrong)
    assert gate.membership == renewed
