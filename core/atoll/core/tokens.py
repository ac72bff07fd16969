"""Join tokens: `atl1.<sha256 of the CA certificate>.<id>.<secret>.<endpoint>`.

The hash lets a node verify the coordinator before it sends anything. The id names the row in the database. The
coordinator stores only a hash of the secret. The endpoint is the enrolment port; it is last because it may contain
dots.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from atoll.core.errors import TokenMalformed

_PATTERN = re.compile(
    r"atl1\.(?P<ca>[0-9a-f]{64})\.(?P<id>[0-9a-f]{12})\.(?P<secret>[0-9a-f]{48})\.(?P<endpoint>\S{3,255})"
)
_QUOTES = ('""', "''", "``", "\u201c\u201d", "\u2018\u2019", "\u201e\u201c", "\u00ab\u00bb", "<>")
_ENDPOINT = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class JoinToken:
    """A parsed token. `repr` never shows the secret."""

    ca_sha256: str
    token_id: str
    secret: str
    endpoint: str

    def __repr__(self) -> str:
        return f"JoinToken(id={self.token_id}, endpoint={self.endpoint})"

    def text(self) -> str:
        """Return the text that users paste."""
        return f"atl1.{self.ca_sha256}.{self.token_id}.{self.secret}.{self.endpoint}"


def parse_join_token(text: str) -> JoinToken:
    """Parse pasted text, in quotes or not. Raises `TokenMalformed`.

    The error never quotes the text, because it may contain a secret.
    """
    match = _PATTERN.fullmatch(_unquoted(text.strip()))
    if (
        match is None or _ENDPOINT.fullmatch(match["endpoint"]) is None
    ):  # a token that was pasted twice contains the secret in its endpoint
        raise TokenMalformed(
            "this is not a join token; it must look like atl1.<64 hex>.<12 hex>.<48 hex>.<host:port>",
            "copy the whole line that `atollctl token create` printed",
        )
    split_endpoint(match["endpoint"])
    return JoinToken(match["ca"], match["id"], match["secret"], match["endpoint"])


def _unquoted(text: str) -> str:
    """Remove quotation marks that a message or a shell put around a token."""
    quoted = len(text) > 1 and (text[0] + text[-1]) in _QUOTES
    return text[1:-1].strip() if quoted else text


def new_join_token(ca_sha256: str, endpoint: str) -> JoinToken:
    """Create a token with a random id and a random 192-bit secret."""
    return JoinToken(ca_sha256, secrets.token_hex(6), secrets.token_hex(24), endpoint)


def hash_secret(secret: str) -> str:
    """Hash a secret for storage. It has 192 random bits, so one SHA-256 suffices."""
    return hashlib.sha256(b"atoll/token-secret/1\0" + secret.encode()).hexdigest()


def secret_matches(secret: str, stored_hash: str) -> bool:
    """Compare a secret with a stored hash in constant time."""
    return hmac.compare_digest(hash_secret(secret), stored_hash)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port` into a pair. Raises `TokenMalformed`."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise TokenMalformed(f"{endpoint!r} is not an endpoint of the form host:port")
    return match["host"].strip("[]"), int(match["port"])
