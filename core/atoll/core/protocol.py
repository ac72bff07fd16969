"""Protocol version of this release, and the check of other versions: the major version must be equal."""

from __future__ import annotations

from atoll.core.errors import ProtocolMismatch
from atoll.v1 import common_pb2 as pb

MAJOR = 2
MINOR = 0


def ours() -> pb.ProtocolVersion:
    """Return this release's version, which every hello, record, plan and manifest contains."""
    return pb.ProtocolVersion(major=MAJOR, minor=MINOR)


def check(theirs: pb.ProtocolVersion, who: str) -> None:
    """Raise `ProtocolMismatch` if `who` uses another major version."""
    if theirs.major != MAJOR:
        older = "older" if theirs.major < MAJOR else "newer"
        raise ProtocolMismatch(
            f"{who} speaks protocol {theirs.major}.{theirs.minor}, which is {older} than ours ({MAJOR}.{MINOR})",
            "install the same release of atoll on both sides",
        )
