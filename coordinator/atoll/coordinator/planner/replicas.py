"""The plan of plain data parallelism: every node holds all layers and is a route of length one. Pure.

All may claim the same weight and reduce the same share; the first plan also deals out the first samples,
later ones leave the data alone because manifests move them on.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.core.data_position import LEASE_ROUNDS, first_position
from atoll.core.plan import Assignment, Plan
from atoll.core.run_spec import RunSpec

REDUCE_BYTES_PER_SECOND = 125_000_000  # 1 Gbit/s; equal for all, so each reduces an equal share


def replicate(
    spec: RunSpec,
    *,
    version: int,
    members: Sequence[str],
    layers: int,
    genesis_hash: bytes,
    issued_unix_ms: int,
    reason: str,
) -> Plan:
    """The plan `version` for `members` (peer ids, at least one) of a model with that many layers."""
    ordered = sorted(members)
    holdings = first_position(ordered, first_lease_samples(spec)).holdings if version == 1 else {}
    return Plan(
        run_id=spec.run.name,
        version=version,
        assignments=tuple(
            Assignment(
                peer_id=peer,
                first_layer=0,
                last_layer=layers - 1,
                data_ranges=holdings.get(peer, ()),
                max_round_tokens=spec.sync.round_tokens,
                max_reduce_bytes_per_second=REDUCE_BYTES_PER_SECOND,
            )
            for peer in ordered
        ),
        routes=tuple((peer,) for peer in ordered),
        genesis_manifest_hash=genesis_hash,
        issued_unix_ms=issued_unix_ms,
        reason=reason,
    )


def first_lease_samples(spec: RunSpec) -> int:
    """What each member starts with: enough for some rounds even if it trained every token alone."""
    return LEASE_ROUNDS * -(-spec.sync.round_tokens // spec.data.sequence_length)
