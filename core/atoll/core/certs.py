"""TLS for the control plane: an Ed25519 certificate authority and P-256 leaf certificates.

gRPC refuses Ed25519 *leaf* certificates, so every TLS key is P-256; the authority that signs them may be Ed25519. A
subject is a URI in the SAN: `atoll://node/<peer id>` or `atoll://admin/<name>`. The server's certificate also carries
the DNS name `SERVER_NAME`; clients expect that name at any address. A private key never leaves the machine that made
it: a node sends a CSR, signed by its identity key too.

An authority that is replaced signs a *hand-over*: a certificate whose URI, `atoll://ca/<SHA-256>`, names its successor.
It is not part of a chain of trust; servers send it in addition to their chain. It tells a client that knows only the
old authority why the server's certificate is from another one.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.core.errors import CertificateInvalid, KeyFileCorrupt
from atoll.core.files import read_private, write_private
from atoll.core.membership import CERTIFICATE_LIFETIME, EXPIRY_GRACE

SERVER_NAME = "coordinator.atoll"
LEAF_LIFETIME = CERTIFICATE_LIFETIME + EXPIRY_GRACE  # members can still renew after a long coordinator outage
CA_LIFETIME = dt.timedelta(days=3650)
HAND_OVER_PREFIX = "atoll://ca/"
_BACKDATE = dt.timedelta(minutes=5)  # tolerates a client clock that is slightly behind
_UNREADABLE = (  # errors of the library for certificates that it cannot parse or that lack an extension
    ValueError,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


@dataclass(frozen=True)
class Credential:
    """A TLS key, its certificate chain and the CA, all PEM, as gRPC takes them."""

    key_pem: bytes
    chain_pem: bytes
    ca_pem: bytes


class CertificateAuthority:
    """Signs leaf certificates. Only the coordinator has one."""

    def __init__(self, key: ed25519.Ed25519PrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        self.pem = certificate.public_bytes(serialization.Encoding.PEM)
        self.sha256 = certificate_sha256(self.pem)
        self.name = certificate.subject.rfc4514_string()

    @classmethod
    def load_or_create(cls, key_path: Path, certificate_path: Path, now: float) -> CertificateAuthority:
        """Read key and certificate, or create both if neither exists. Raises `KeyFileCorrupt`, `DataDirUnusable`."""
        if key_path.exists() != certificate_path.exists():
            present, absent = (key_path, certificate_path) if key_path.exists() else (certificate_path, key_path)
            raise KeyFileCorrupt(
                f"{key_path.parent} has {present.name} but not {absent.name}",
                "restore both from a backup: without them every node must enrol again",
            )
        if not key_path.exists():
            fresh = cls.generate(now)
            write_private(key_path, fresh.key_pem)
            write_private(certificate_path, fresh.pem)
        return cls.from_pem(read_private(key_path), read_private(certificate_path), f"{key_path} or its certificate")

    @classmethod
    def from_pem(cls, key_pem: bytes, certificate_pem: bytes, what: str) -> CertificateAuthority:
        """Read key and certificate. Raises `KeyFileCorrupt` about `what`."""
        try:
            key = serialization.load_pem_private_key(key_pem, None)
            certificate = x509.load_pem_x509_certificate(certificate_pem)
        except ValueError as error:
            raise KeyFileCorrupt(f"{what} cannot be read: {error}") from error
        if not isinstance(key, ed25519.Ed25519PrivateKey) or key.public_key() != certificate.public_key():
            raise KeyFileCorrupt(f"{what}: the key is not the key of the certificate")
        return cls(key, certificate)

    @classmethod
    def generate(cls, now: float) -> CertificateAuthority:
        """Create an authority. Its name is random, so that TLS finds the right one of two."""
        key = ed25519.Ed25519PrivateKey.generate()
        name = _name(f"Atoll certificate authority {secrets.token_hex(8)}")
        certificate = (
            _unsigned(name, name, key.public_key(), now, CA_LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(key, None)
        )
        return cls(key, certificate)

    @property
    def key_pem(self) -> bytes:
        """The private key. It leaves this process only for a file of mode 0600."""
        return _private_pem(self._key)

    def hand_over(self, successor: CertificateAuthority, now: float) -> bytes:
        """Return a certificate (PEM) by which this authority names its successor."""
        uri = x509.UniformResourceIdentifier(HAND_OVER_PREFIX + successor.sha256)
        name, key = _name("Atoll hand-over"), successor._key.public_key()
        signed = (
            _unsigned(name, self._certificate.subject, key, now, CA_LIFETIME)
            .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self._key, None)
        )
        return signed.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        public_key: ec.EllipticCurvePublicKey,
        subject: str,
        now: float,
        *,
        server: bool = False,
        lifetime: dt.timedelta = LEAF_LIFETIME,
    ) -> bytes:
        """Return a leaf for `subject` (a URI) followed by the CA's certificate, PEM."""
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(subject)]
        if server:
            names.append(x509.DNSName(SERVER_NAME))
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
        leaf = (
            _unsigned(_name("atoll"), self._certificate.subject, public_key, now, lifetime)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .sign(self._key, None)
        )
        return leaf.public_bytes(serialization.Encoding.PEM) + self.pem

    def issue_with_new_key(
        self, subject: str, now: float, *, server: bool = False, lifetime: dt.timedelta = LEAF_LIFETIME
    ) -> Credential:
        """Create a key and its leaf; used for the server and for the admin credential."""
        key = ec.generate_private_key(ec.SECP256R1())
        chain = self.issue(key.public_key(), subject, now, server=server, lifetime=lifetime)
        return Credential(_private_pem(key), chain, self.pem)


def new_tls_key_and_csr() -> tuple[bytes, bytes]:
    """Create a P-256 key; return it as PEM and its CSR as DER."""
    key = ec.generate_private_key(ec.SECP256R1())
    csr = x509.CertificateSigningRequestBuilder().subject_name(_name("atoll")).sign(key, hashes.SHA256())
    return _private_pem(key), csr.public_bytes(serialization.Encoding.DER)


def csr_public_key(csr_der: bytes) -> ec.EllipticCurvePublicKey:
    """Check a CSR's self-signature and return its P-256 key. Raises `CertificateInvalid`."""
    try:
        csr = x509.load_der_x509_csr(csr_der)
        valid = csr.is_signature_valid
        key = csr.public_key()
    except (ValueError, InvalidSignature) as error:
        raise CertificateInvalid(f"the certificate request does not parse: {error}") from error
    if not valid or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateInvalid("the certificate request must have a P-256 key and be signed by it")
    return key


def certificate_sha256(pem: bytes) -> str:
    """Hex SHA-256 of the DER of the first certificate in `pem`; join tokens name the CA by it."""
    der = x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)
    return hashlib.sha256(der).hexdigest()


def issuer_name(pem: bytes) -> str:
    """Issuer of the first certificate in `pem`. It identifies the authority once TLS has checked the signature."""
    return x509.load_pem_x509_certificate(pem).issuer.rfc4514_string()


def is_issued_by(pem: bytes, ca_pem: bytes) -> bool:
    """Return whether the first certificate in `pem` is signed by the first in `ca_pem`; says nothing about time."""
    try:
        x509.load_pem_x509_certificate(pem).verify_directly_issued_by(x509.load_pem_x509_certificate(ca_pem))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def is_handed_over(chain_der: Iterable[bytes], ca_pem: bytes) -> bool:
    """Tell whether a server's certificates contain a hand-over from an authority in `ca_pem` to one in the chain."""
    chain = list(chain_der)
    shown = {HAND_OVER_PREFIX + hashlib.sha256(der).hexdigest() for der in chain}
    for der in chain:
        try:
            names_shown = subject_uri(der) in shown
        except CertificateInvalid:
            continue
        pem = x509.load_der_x509_certificate(der).public_bytes(serialization.Encoding.PEM)
        if names_shown and any(is_issued_by(pem, known) for known in split_pem(ca_pem)):
            return True
    return False


def split_pem(pem: bytes) -> list[bytes]:
    """The certificates in `pem`, one each."""
    end = b"-----END CERTIFICATE-----\n"
    return [part + end for part in pem.split(end) if part.strip()]


def not_after(pem: bytes) -> float:
    """Expiry of the first certificate in `pem`, in Unix seconds."""
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()


def subject_uri(pem_or_der: bytes) -> str:
    """The `atoll://` URI of a leaf. Raises `CertificateInvalid`."""
    load = x509.load_pem_x509_certificate if pem_or_der.startswith(b"-----") else x509.load_der_x509_certificate
    try:
        names = load(pem_or_der).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except _UNREADABLE as error:
        raise CertificateInvalid("the certificate has no subject name") from error
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise CertificateInvalid(f"the certificate has {len(uris)} subject URIs; it must have one")
    return uris[0]


def _moment(unix: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(int(unix), dt.UTC)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _unsigned(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey,
    now: float,
    lifetime: dt.timedelta,
) -> x509.CertificateBuilder:
    """A certificate without extensions and signature, valid from now on."""
    start = _moment(now)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - _BACKDATE)
        .not_valid_after(start + lifetime)
    )


def _private_pem(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
