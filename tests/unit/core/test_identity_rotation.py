"""A statement that an identity has a new key needs both keys, and is for one operator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import SignatureInvalid
from atoll.core.identity import Identity, fingerprint
from atoll.core.identity_rotation import sign_rotation, verify_rotation
from atoll.v1 import common_pb2 as pb

OLD, NEW, THIEF, OPERATOR = (Identity.generate() for _ in range(4))


def test_it_names_both_identities() -> None:
    stated = verify_rotation(sign_rotation(OLD, NEW, OPERATOR.public_key), OPERATOR.public_key)
    assert (stated.old_peer_id, stated.new_peer_id) == (OLD.peer_id, NEW.peer_id)


def test_another_operator_refuses_it() -> None:
    with pytest.raises(SignatureInvalid, match="another operator"):
        verify_rotation(sign_rotation(OLD, NEW, THIEF.public_key), OPERATOR.public_key)


@pytest.mark.parametrize(("first", "second"), [(THIEF, NEW), (OLD, THIEF), (NEW, OLD)])
def test_both_keys_must_sign(first: Identity, second: Identity) -> None:
    names = fingerprint(OPERATOR.public_key), OLD.public_key, NEW.public_key
    statement = pb.RotationStatement(operator_id=names[0], old_public_key=names[1], new_public_key=names[2])
    words = statement.SerializeToString()
    signatures = [signer.sign("identity-rotation", words) for signer in (first, second)]
    forged = pb.IdentityRotation(statement=words, old_signature=signatures[0], new_signature=signatures[1])
    with pytest.raises(SignatureInvalid):
        verify_rotation(forged, OPERATOR.public_key)


def test_a_key_does_not_replace_itself() -> None:
    with pytest.raises(SignatureInvalid, match="twice"):
        verify_rotation(sign_rotation(OLD, OLD, OPERATOR.public_key), OPERATOR.public_key)


@given(st.binary(max_size=100), st.binary(max_size=70), st.binary(max_size=70))
def test_other_bytes_are_refused(statement: bytes, first: bytes, second: bytes) -> None:
    rotation = pb.IdentityRotation(statement=statement, old_signature=first, new_signature=second)
    with pytest.raises(SignatureInvalid):
        verify_rotation(rotation, OPERATOR.public_key)
