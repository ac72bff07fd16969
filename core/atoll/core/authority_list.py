"""The coordinator's certificate authorities, signed with its operator key for members that know older ones. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from google.protobuf.message import DecodeError

from atoll.core.errors import CertificateInvalid, SignatureInvalid
from atoll.core.identity import Identity, fingerprint, verify_signed
from atoll.v1 import common_pb2 as pb

MAX_AUTHORITIES = 4
MAX_CERTIFICATE_BYTES = 4096
_CONTEXT = "authorities"


@dataclass(frozen=True)
class AuthorityList:
    """A verified list of certificates (PEM), the newest first."""

    number: int
    certificates_pem: tuple[bytes, ...]


def issue_authority_list(operator: Identity, number: int, certificates_pem: Sequence[bytes]) -> pb.Signed:
    """Sign a list. `number` must be higher than those of all earlier lists."""
    payload = pb.AuthorityList(
        operator_id=fingerprint(operator.public_key), number=number, certificates_pem=certificates_pem
    )
    return operator.sign_message(_CONTEXT, payload.SerializeToString())


def verify_authority_list(signed: pb.Signed, operator_key: bytes) -> AuthorityList:
    """Check signature, operator and certificates. Raises `SignatureInvalid`, `CertificateInvalid`."""
    try:
        listed = pb.AuthorityList.FromString(verify_signed(_CONTEXT, signed, operator_key))
    except DecodeError as error:
        raise SignatureInvalid("the list of certificate authorities does not parse") from error
    found = tuple(listed.certificates_pem)
    if listed.operator_id != fingerprint(operator_key) or not 1 <= len(found) <= MAX_AUTHORITIES:
        raise CertificateInvalid("the list of certificate authorities is of another operator, empty, or too long")
    for pem in found:
        _check(pem)
    return AuthorityList(listed.number, found)


def _check(pem: bytes) -> None:
    try:
        if len(pem) > MAX_CERTIFICATE_BYTES or len(x509.load_pem_x509_certificates(pem)) != 1:
            raise ValueError("it is too long, or several")
    except ValueError as error:
        raise CertificateInvalid(f"a certificate authority in the list cannot be read: {error}") from error
