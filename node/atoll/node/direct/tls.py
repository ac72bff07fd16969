"""TLS 1.3 contexts for direct connections: a self-signed certificate per process, pinned by its hash.

No authority signs the certificate: the dialler gets its hash over an authenticated libp2p stream. The dialler shows no
certificate; its ticket identifies it.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import os
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_LIFETIME = dt.timedelta(days=3650)  # nobody checks it: the process ends earlier
_BACKDATE = dt.timedelta(days=1)


def listening_context(directory: Path, now: float) -> tuple[ssl.SSLContext, bytes]:
    """Make a context with a new key and certificate; return it with the certificate's SHA-256.

    `directory` holds a temporary file that is removed before this returns.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "atoll")])
    start = dt.datetime.fromtimestamp(now, dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - _BACKDATE)
        .not_valid_after(start + _LIFETIME)
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no session resumption: it would bypass the pinned certificate
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    descriptor, path = tempfile.mkstemp(dir=directory)  # OpenSSL only reads files; mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(private + certificate.public_bytes(serialization.Encoding.PEM))
        context.load_cert_chain(path)
    finally:
        Path(path).unlink()
    return context, hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()


def dialling_context() -> ssl.SSLContext:
    """Make a context that verifies no certificate; the caller checks with `is_pinned`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def is_pinned(connection: ssl.SSLObject, certificate_sha256: bytes) -> bool:
    """Return whether the peer proved that it has the key of the pinned certificate."""
    shown = connection.getpeercert(binary_form=True)
    return shown is not None and hmac.compare_digest(hashlib.sha256(shown).digest(), certificate_sha256)
