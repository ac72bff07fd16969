"""A list of certificate authorities counts only from this run's operator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.authority_list import MAX_AUTHORITIES, issue_authority_list, verify_authority_list
from atoll.core.certs import CertificateAuthority
from atoll.core.errors import CertificateInvalid, SignatureInvalid
from atoll.core.identity import Identity

OPERATOR, OTHER = Identity.generate(), Identity.generate()
PEMS = [CertificateAuthority.generate(1_700_000_000.0).pem for _ in range(MAX_AUTHORITIES + 1)]


def test_the_newest_comes_first() -> None:
    told = verify_authority_list(issue_authority_list(OPERATOR, 3, PEMS[:2]), OPERATOR.public_key)
    assert (told.number, told.certificates_pem) == (3, tuple(PEMS[:2]))


def test_another_operator_is_not_believed() -> None:
    with pytest.raises(SignatureInvalid):
        verify_authority_list(issue_authority_list(OTHER, 3, PEMS[:1]), OPERATOR.public_key)


@pytest.mark.parametrize("pems", [[], PEMS, [b""], [b"garbage"], [PEMS[0] + PEMS[1]], [PEMS[0] + b" " * 5000]])
def test_impossible_lists_are_refused(pems: list[bytes]) -> None:
    with pytest.raises(CertificateInvalid):
        verify_authority_list(issue_authority_list(OPERATOR, 1, pems), OPERATOR.public_key)


@given(st.binary(max_size=300))
def test_signed_bytes_that_are_no_list_are_refused(payload: bytes) -> None:
    with pytest.raises((SignatureInvalid, CertificateInvalid)):
        verify_authority_list(OPERATOR.sign_message("authorities", payload), OPERATOR.public_key)
