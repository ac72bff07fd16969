"""What both ends of the direct path agree on."""

from __future__ import annotations

PROTOCOL = "/atoll/direct/2"  # over libp2p: answers with a way in; also the name under which its own frames are counted
BULK_PROTOCOLS = frozenset(
    {"/atoll/average/1", "/atoll/pipeline/1", "/atoll/state/1"}
)  # worth a connection of their own
OPTIMISTIC_PROTOCOLS = frozenset(
    {"/atoll/average/1"}
)  # begun every round: their first frames need not wait to be let in
MAX_BEGIN_BYTES = 256  # of a DirectBegin
MAX_OFFER_BYTES = 4096
MAX_HOSTS = 8  # named in an offer, and tried by who got it
