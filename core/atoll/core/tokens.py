"""Join tokens: `atl1.<sha256 of the CA certificate>.<id>.<secret>.<endpoint>`.

The hash lets a node check the coordinator before it tells it anything; the id finds the row; the secret is
stored only as a hash; the endpoint is the enrolment port. The endpoint comes last because it may hold dots.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass

from atoll.core.errors import TokenMalformed
from atoll.core.identity import random_secret

_PATTERN = re.compile(
    r"atl1\.(?P<ca>[0-9a-f]{64})\.(?P<id>[0-9a-f]{12})\.(?P<secret>[0-9a-f]{48})\.(?P<endpoint>\S{3,255})"
)
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
        """The form that people paste."""
        return f"atl1.{self.ca_sha256}.{self.token_id}.{self.secret}.{self.endpoint}"


def parse_join_token(text: str) -> JoinToken:
    """Read what a person pasted. Raises `TokenMalformed`, never quoting the text (it may hold a secret)."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None or _ENDPOINT.fullmatch(match["endpoint"]) is None:  # pasted twice, it holds the secret there
        raise TokenMalformed(
            "this is not a join token; it should look like atl1.<64 hex>.<12 hex>.<48 hex>.<host:port>",
            "copy the whole line that `atollctl token create` printed",
        )
    split_endpoint(match["endpoint"])
    return JoinToken(match["ca"], match["id"], match["secret"], match["endpoint"])


def new_join_token(ca_sha256: str, endpoint: str) -> JoinToken:
    """A fresh random id and secret (192 bits)."""
    return JoinToken(ca_sha256, random_secret(6).hex(), random_secret(24).hex(), endpoint)


def hash_secret(secret: str) -> str:
    """What the coordinator stores. The secret is random and long, so one SHA-256 is enough."""
    return hashlib.sha256(b"atoll/token-secret/1\0" + secret.encode()).hexdigest()


def secret_matches(secret: str, stored_hash: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(hash_secret(secret), stored_hash)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as a pair. Raises `TokenMalformed`."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise TokenMalformed(f"{endpoint!r} is not an endpoint of the form host:port")
    return match["host"].strip("[]"), int(match["port"])
