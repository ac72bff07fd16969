"""Statement of a node that its identity has a new key, signed with the old key and the new one.

The old key's signature gives the membership away. The new key's signature shows that its owner accepts it. The
statement names the operator, so no other coordinator accepts it.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from atoll.core.errors import SignatureInvalid
from atoll.core.identity import Identity, fingerprint, peer_id_of, verify
from atoll.v1 import common_pb2 as pb

_CONTEXT = "identity-rotation"


@dataclass(frozen=True)
class Rotation:
    """A verified statement. Public keys are raw 32-byte Ed25519 keys."""

    old_peer_id: str
    new_public_key: bytes

    @property
    def new_peer_id(self) -> str:
        """Peer id of the new key."""
        return peer_id_of(self.new_public_key)


def sign_rotation(old: Identity, new: Identity, operator_key: bytes) -> pb.IdentityRotation:
    """State that `new` replaces `old` at this operator."""
    statement = pb.RotationStatement(
        operator_id=fingerprint(operator_key), old_public_key=old.public_key, new_public_key=new.public_key
    ).SerializeToString(deterministic=True)
    return pb.IdentityRotation(
        statement=statement, old_signature=old.sign(_CONTEXT, statement), new_signature=new.sign(_CONTEXT, statement)
    )


def verify_rotation(rotation: pb.IdentityRotation, operator_key: bytes) -> Rotation:
    """Check operator and both signatures. Raises `SignatureInvalid`."""
    try:
        stated = pb.RotationStatement.FromString(rotation.statement)
    except DecodeError as error:
        raise SignatureInvalid("the statement of a new identity does not parse") from error
    if stated.operator_id != fingerprint(operator_key):
        raise SignatureInvalid("the statement of a new identity is for another operator")
    if stated.old_public_key == stated.new_public_key:
        raise SignatureInvalid("the statement of a new identity names one key twice")
    verify(_CONTEXT, rotation.statement, rotation.old_signature, stated.old_public_key)
    verify(_CONTEXT, rotation.statement, rotation.new_signature, stated.new_public_key)
    return Rotation(peer_id_of(stated.old_public_key), stated.new_public_key)
