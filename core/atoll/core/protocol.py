"""Which version of the protocol we speak, and who we can speak with."""

from __future__ import annotations

from atoll.core.errors import ProtocolMismatch
from atoll.v1 import common_pb2 as pb

MAJOR = 1
MINOR = 0


def ours() -> pb.ProtocolVersion:
    """The version that we put into every hello, record, plan and manifest."""
    return pb.ProtocolVersion(major=MAJOR, minor=MINOR)


def check(theirs: pb.ProtocolVersion, who: str) -> None:
    """Raise `ProtocolMismatch` if `who` speaks another major version."""
    if theirs.major != MAJOR:
        older = "older" if theirs.major < MAJOR else "newer"
        raise ProtocolMismatch(
            f"{who} speaks protocol {theirs.major}.{theirs.minor}, which is {older} than ours ({MAJOR}.{MINOR})",
            "install the same release of atoll on both sides",
        )
