"""Secrets of the coordinator: certificate authority, operator key, and the certificates that they issue.

All files are in the data directory with mode 0600. The operator key is never replaced; the authority is, by
`authorities.py`. The server's own leaf certificate exists only in memory and is renewed there.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc

from atoll.coordinator.authorities import Authorities, Trusted
from atoll.core import certs
from atoll.core.authority_list import issue_authority_list
from atoll.core.clock import Clock
from atoll.core.errors import CertificateInvalid
from atoll.core.files import make_private_dir, write_private
from atoll.core.identity import Identity
from atoll.core.membership import RENEW_AT_FRACTION
from atoll.v1 import common_pb2 as pb

SERVER_SUBJECT = "atoll://coordinator/self"
ADMIN_SUBJECT = "atoll://admin/operator"
ADMIN_LIFETIME = timedelta(days=365)
SERVER_LIFETIME = timedelta(days=30)


class CoordinatorKeys:
    """The authority and the operator key, loaded or created. Raises `KeyFileCorrupt`, `DataDirUnusable`."""

    def __init__(self, data_dir: Path, clock: Clock) -> None:
        now = clock.unix()
        _remove_incomplete_authority(data_dir)
        self.authorities = Authorities(data_dir, now)
        self.operator = Identity.load_or_create(data_dir / "operator.key")
        self._clock = clock
        self.announced: AuthorityAnnouncement | None = None
        self.announce()

    @property
    def ca(self) -> certs.CertificateAuthority:
        """The authority of the server's certificates, which tokens name."""
        return self.authorities.now.serving

    def issue_node(self, csr_der: bytes, peer_id: str) -> bytes:
        """Issue a leaf certificate for a member's TLS key, with the CA's chain. Raises `CertificateInvalid`."""
        issuing = self.authorities.now.issuing
        return issuing.issue(certs.csr_public_key(csr_der), f"atoll://node/{peer_id}", self._clock.unix())

    def announce(self) -> None:
        """Send members the list of authorities from now on, if the authorities ever changed."""
        trusted = self.authorities.now
        if trusted.number:
            pems = [authority.pem for authority in trusted.all]
            signed = issue_authority_list(self.operator, trusted.number, pems)
            self.announced = AuthorityAnnouncement(trusted.number, signed)


@dataclass(frozen=True)
class AuthorityAnnouncement:
    """The signed list of authorities that is sent to members."""

    number: int
    signed: pb.Signed


class ServerCertificate:
    """Leaf certificate of one TLS port, renewed in the process well before it expires.

    gRPC's threads ask for it at every handshake, and must get None unless it has changed. When gRPC gets a
    configuration, it frees the one in use; a concurrent handshake then crashes the process (grpcio 1.85; 40 concurrent
    handshakes did so within a second). So a leaf is valid for weeks and changes at a restart or rarely. After a
    change of authorities `server.py` makes the next handshake itself, before members come to renew.
    """

    def __init__(self, authorities: Authorities, clock: Clock) -> None:
        self._authorities = authorities
        self._number = -1
        self._clock = clock
        self._lock = threading.Lock()
        self._renew_at = 0.0

    def credentials(self, *, mutual: bool) -> grpc.ServerCredentials:
        """Server credentials; with `mutual`, they require a client certificate of a trusted CA."""
        first = self._issue(self._clock.unix())
        return grpc.dynamic_ssl_server_credentials(first, self.fetch, mutual)  # type: ignore[arg-type]  # may be None

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """A new configuration if the leaf is due for renewal or the authorities changed; None: no change."""
        now = self._clock.unix()
        with self._lock:
            is_due = now >= self._renew_at or self._authorities.now.number != self._number
            return self._issue(now) if is_due else None

    def _issue(self, now: float) -> grpc.ServerCertificateConfiguration:
        trusted = self._authorities.now
        leaf = trusted.serving.issue_with_new_key(SERVER_SUBJECT, now, server=True, lifetime=SERVER_LIFETIME)
        self._number = trusted.number
        self._renew_at = now + RENEW_AT_FRACTION * SERVER_LIFETIME.total_seconds()
        return grpc.ssl_server_certificate_configuration(
            [(leaf.key_pem, leaf.chain_pem + trusted.shown_pem)], root_certificates=trusted.pem
        )


def write_admin_credential(keys: CoordinatorKeys, directory: Path, endpoint: str, now: float) -> None:
    """Create or renew `atollctl`'s credential, and write the endpoint where the coordinator listens."""
    make_private_dir(directory)
    chain, trusted = directory / "admin.crt", keys.authorities.now
    if not _is_renewal_not_due(chain, trusted, now):
        fresh = trusted.issuing.issue_with_new_key(ADMIN_SUBJECT, now, lifetime=ADMIN_LIFETIME)
        write_private(directory / "admin.key", fresh.key_pem)
        write_private(directory / "ca.crt", trusted.pem)
        write_private(chain, fresh.chain_pem)
    settings = {"endpoint": endpoint, "server_name": certs.SERVER_NAME}
    lines = ["version = 1", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    write_private(directory / "admin.toml", ("\n".join(lines) + "\n").encode())


def _remove_incomplete_authority(data_dir: Path) -> None:
    """Delete a CA key whose certificate was never written, after an interrupted first start.

    Operator key and database are created later. Without them nothing was ever signed, and no backup can exist.
    """
    if not any((data_dir / name).exists() for name in ("ca.crt", "operator.key", "coordinator.db")):
        (data_dir / "ca.key").unlink(missing_ok=True)


def _is_renewal_not_due(chain: Path, trusted: Trusted, now: float) -> bool:
    """True if the credential is from the newest CA, trusts all current authorities, and is not in its last third."""
    if not chain.exists() or not (chain.parent / "admin.key").exists() or not (chain.parent / "ca.crt").exists():
        return False
    pem = chain.read_bytes()
    try:
        fresh = certs.not_after(pem) - now > ADMIN_LIFETIME.total_seconds() / 3
        ours = pem.endswith(trusted.issuing.pem) and (chain.parent / "ca.crt").read_bytes() == trusted.pem
        return fresh and ours and certs.subject_uri(pem) == ADMIN_SUBJECT
    except (ValueError, CertificateInvalid):
        return False
