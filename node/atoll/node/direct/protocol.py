"""Constants on which both ends of a direct connection agree."""

from __future__ import annotations

PROTOCOL = (
    "/atoll/direct/2"  # over libp2p: requests a direct offer; also counts the control frames of direct connections
)
BULK_PROTOCOLS = frozenset(  # protocols that use direct connections
    {"/atoll/average/1", "/atoll/pipeline/1", "/atoll/state/1", "/atoll/corpus/1"}
)
OPTIMISTIC_PROTOCOLS = frozenset({"/atoll/average/1"})  # opened in every round: the dialler may send before the accept
MAX_BEGIN_BYTES = 256  # of a DirectBegin
MAX_HOSTS = 8  # of one peer that are dialled
