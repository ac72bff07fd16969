"""The coordinator's own secrets: the certificate authority, the operator's signing key, and what they issue.

Everything lies in the data directory with mode 0600, is made once and never written over. The server's own
leaf lives in memory only and is renewed there; gRPC asks `ServerCertificate` at every handshake.
"""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from pathlib import Path

import grpc

from atoll.core import certs
from atoll.core.clock import Clock
from atoll.core.errors import CertificateInvalid
from atoll.core.files import make_private_dir, write_private
from atoll.core.identity import Identity
from atoll.core.membership import CERTIFICATE_LIFETIME, RENEW_AT

SERVER_SUBJECT = "atoll://coordinator/self"
ADMIN_SUBJECT = "atoll://admin/operator"
ADMIN_LIFETIME = timedelta(days=365)


class Keys:
    """The authority and the operator's key, loaded or created. Raises `KeyFileCorrupt`, `DataDirUnusable`."""

    def __init__(self, data_dir: Path, clock: Clock) -> None:
        now = clock.unix()
        self.ca = certs.CertificateAuthority.load_or_create(data_dir / "ca.key", data_dir / "ca.crt", now)
        self.operator = Identity.load_or_create(data_dir / "operator.key")
        self._clock = clock

    def issue_node(self, csr_der: bytes, peer_id: str) -> bytes:
        """A leaf for a member's TLS key, with the CA behind it. Raises `CertificateInvalid`."""
        return self.ca.issue(certs.csr_public_key(csr_der), f"atoll://node/{peer_id}", self._clock.unix())


class ServerCertificate:
    """The server's leaf, renewed in process well before it ends. Safe to call from gRPC's threads."""

    def __init__(self, ca: certs.CertificateAuthority, clock: Clock) -> None:
        self._ca = ca
        self._clock = clock
        self._lock = threading.Lock()
        self._renew_at = 0.0
        self._current: grpc.ServerCertificateConfiguration | None = None

    def credentials(self, *, mutual: bool) -> grpc.ServerCredentials:
        """Server credentials; `mutual` ones ask for a client certificate of our CA."""
        return grpc.dynamic_ssl_server_credentials(self.current(), self.current, mutual)

    def current(self) -> grpc.ServerCertificateConfiguration:
        """The configuration for the next handshake."""
        now = self._clock.unix()
        with self._lock:
            if self._current is None or now >= self._renew_at:
                leaf = self._ca.issue_local(SERVER_SUBJECT, now, server=True)
                self._current = grpc.ssl_server_certificate_configuration(
                    [(leaf.key_pem, leaf.chain_pem)], root_certificates=self._ca.pem
                )
                self._renew_at = now + RENEW_AT * CERTIFICATE_LIFETIME.total_seconds()
            return self._current


def write_admin_credential(keys: Keys, directory: Path, endpoint: str, now: float) -> None:
    """Make `atollctl`'s credential, or keep a good one, and write where the coordinator listens now."""
    make_private_dir(directory)
    chain = directory / "admin.crt"
    if not _still_good(chain, keys.ca, now):
        fresh = keys.ca.issue_local(ADMIN_SUBJECT, now, lifetime=ADMIN_LIFETIME)
        write_private(directory / "admin.key", fresh.key_pem)
        write_private(directory / "ca.crt", fresh.ca_pem)
        write_private(chain, fresh.chain_pem)
    named = {"endpoint": endpoint, "server_name": certs.SERVER_NAME}
    lines = ["version = 1", *(f"{key} = {json.dumps(value)}" for key, value in named.items())]
    write_private(directory / "admin.toml", ("\n".join(lines) + "\n").encode())


def _still_good(chain: Path, ca: certs.CertificateAuthority, now: float) -> bool:
    """Of our CA, and not in the last third of its life."""
    if not chain.exists() or not (chain.parent / "admin.key").exists() or not (chain.parent / "ca.crt").exists():
        return False
    pem = chain.read_bytes()
    try:
        fresh = certs.not_after(pem) - now > ADMIN_LIFETIME.total_seconds() / 3
        return fresh and pem.endswith(ca.pem) and certs.subject_uri(pem) == ADMIN_SUBJECT
    except (ValueError, CertificateInvalid):
        return False
