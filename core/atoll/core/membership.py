"""Membership certificates and the deny-list, both signed by the operator.

Peers verify them offline, in the gate and in DHT records, so nothing here does I/O. A certificate stays valid for
`EXPIRY_GRACE` after `not_after`, because the coordinator may be unreachable when it is to be renewed.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from google.protobuf.message import DecodeError

from atoll.core import protocol
from atoll.core.errors import Banned, CertificateInvalid, SignatureInvalid
from atoll.core.identity import Identity, fingerprint, peer_id_of, verify_signed
from atoll.v1 import common_pb2 as pb

CERTIFICATE_LIFETIME = timedelta(hours=24)
RENEW_AT_FRACTION = 2 / 3  # of the lifetime
EXPIRY_GRACE = timedelta(hours=72)
SKEW_ALLOWED = timedelta(minutes=5)
MAX_CERTIFICATE_BYTES = 2048

ROLES = {"node": pb.ROLE_NODE, "seed": pb.ROLE_SEED, "admin": pb.ROLE_ADMIN}
ROLE_NAMES = {number: name for name, number in ROLES.items()}


@dataclass(frozen=True)
class Member:
    """A verified membership certificate."""

    peer_id: str
    public_key: bytes
    run_id: str
    roles: frozenset[str]
    epoch: int
    not_after: float  # Unix seconds
    node_name: str

    def valid_at(self, now: float) -> bool:
        """Return whether the certificate is valid at Unix time `now`, grace included."""
        return now <= self.not_after + EXPIRY_GRACE.total_seconds()


def issue_membership(
    operator: Identity,
    *,
    public_key: bytes,
    run_id: str,
    roles: frozenset[str],
    epoch: int,
    now: float,
    node_name: str,
    run_created_unix_ms: int = 0,
) -> pb.Signed:
    """Sign a certificate that is valid for 24 h from `now` (Unix seconds)."""
    payload = pb.Membership(
        protocol=protocol.ours(),
        peer_id=peer_id_of(public_key),
        public_key=public_key,
        operator_id=fingerprint(operator.public_key),
        run_id=run_id,
        roles=sorted(ROLES[role] for role in roles),
        epoch=epoch,
        not_before_unix_ms=int(now * 1000),
        not_after_unix_ms=int((now + CERTIFICATE_LIFETIME.total_seconds()) * 1000),
        node_name=node_name,
        run_created_unix_ms=run_created_unix_ms,
    )
    return operator.sign_message("membership", payload.SerializeToString())


@dataclass(frozen=True)
class DenyList:
    """A verified deny-list."""

    number: int
    peer_ids: frozenset[str]


EMPTY_DENY_LIST = DenyList(0, frozenset())


@dataclass(frozen=True)
class MembershipVerifier:
    """Verifies membership certificates and deny-lists of one run with the operator's key."""

    operator_key: bytes
    run_id: str
    run_created_unix_ms: int = 0  # of the verifier's own run; 0: not known

    def verify_membership(self, signed: pb.Signed, now: float, *, expect_peer_id: str | None = None) -> Member:
        """Check signature, operator, run, key, time and version. Raises `CertificateInvalid`, `ProtocolMismatch`."""
        if signed.ByteSize() > MAX_CERTIFICATE_BYTES:
            raise CertificateInvalid(
                f"the membership certificate has {signed.ByteSize()} bytes; the limit is {MAX_CERTIFICATE_BYTES}"
            )
        try:
            membership = pb.Membership.FromString(verify_signed("membership", signed, self.operator_key))
        except (SignatureInvalid, DecodeError) as error:
            raise CertificateInvalid(f"the membership certificate is not from this run's operator: {error}") from error
        protocol.check(membership.protocol, f"peer {membership.peer_id}")
        self._check_subject(membership, expect_peer_id)
        if now < membership.not_before_unix_ms / 1000 - SKEW_ALLOWED.total_seconds():
            raise CertificateInvalid("the membership certificate is not valid yet", "check this machine's clock")
        member = Member(
            peer_id=membership.peer_id,
            public_key=membership.public_key,
            run_id=membership.run_id,
            roles=frozenset(ROLE_NAMES[role] for role in membership.roles if role in ROLE_NAMES),
            epoch=membership.epoch,
            not_after=membership.not_after_unix_ms / 1000,
            node_name=membership.node_name,
        )
        if not member.valid_at(now):
            raise CertificateInvalid("the membership certificate has expired", "join again with a new token")
        return member

    def _check_subject(self, membership: pb.Membership, expect_peer_id: str | None) -> None:
        if membership.operator_id != fingerprint(self.operator_key) or membership.run_id != self.run_id:
            raise CertificateInvalid(
                f"the membership certificate is for run {membership.run_id!r}, not {self.run_id!r}"
            )
        created = membership.run_created_unix_ms
        if created and self.run_created_unix_ms and created != self.run_created_unix_ms:
            raise CertificateInvalid(f"the membership certificate is for a deleted run of the name {self.run_id!r}")
        if peer_id_of(membership.public_key) != membership.peer_id:
            raise CertificateInvalid("the peer id in the membership certificate does not match its key")
        if expect_peer_id is not None and membership.peer_id != expect_peer_id:
            raise CertificateInvalid(f"peer {expect_peer_id} sent the membership certificate of {membership.peer_id}")

    def verify_deny_list(self, signed: pb.Signed) -> DenyList:
        """Check signature and operator. Raises `SignatureInvalid`, `CertificateInvalid`."""
        try:
            listed = pb.DenyList.FromString(verify_signed("deny-list", signed, self.operator_key))
        except DecodeError as error:
            raise SignatureInvalid("the deny-list does not parse") from error
        if listed.operator_id != fingerprint(self.operator_key):
            raise CertificateInvalid("the deny-list is from another operator")
        return DenyList(listed.number, frozenset(listed.peer_ids))


def issue_deny_list(operator: Identity, number: int, peer_ids: frozenset[str], now: float) -> pb.Signed:
    """Sign a deny-list. `number` must be higher than those of all earlier lists."""
    payload = pb.DenyList(
        operator_id=fingerprint(operator.public_key),
        number=number,
        peer_ids=sorted(peer_ids),
        issued_unix_ms=int(now * 1000),
    )
    return operator.sign_message("deny-list", payload.SerializeToString())


def newer_deny_list(current: DenyList, offered: DenyList) -> DenyList:
    """Return the deny-list with the higher number; `current` if they are equal."""
    return offered if offered.number > current.number else current


def refuse_banned(deny: DenyList, peer_id: str) -> None:
    """Raise `Banned` if the peer is on the list."""
    if peer_id in deny.peer_ids:
        raise Banned(f"the operator banned peer {peer_id}")
