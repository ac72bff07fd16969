"""Members for tests that need no coordinator."""

from atoll.core.identity import Identity
from atoll.core.membership import issue_membership
from atoll.v1 import common_pb2 as pb


def certificate_of(
    identity: Identity, operator: Identity, now: float, *, run_id: str = "reef", name: str = "n", created: int = 0
) -> pb.Signed:
    """A node's membership from `now` on."""
    return issue_membership(
        operator,
        public_key=identity.public_key,
        run_id=run_id,
        roles=frozenset({"node"}),
        epoch=1,
        now=now,
        node_name=name,
        run_created_unix_ms=created,
    )
