"""The plan of plain data parallelism: every node holds all layers and is a route of length one. Pure.

All may claim the same weight; what each reduces follows its link (`shares.py`). Until a round has committed, plans deal
out the samples: whoever stays keeps its own, newcomers get the next ones. From then on manifests say who holds what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.core.data_position import LEASE_ROUNDS
from atoll.core.plan import Assignment, Base, Plan, Range
from atoll.core.run_spec import RunSpec

REDUCE_BYTES_PER_SECOND = 125_000_000  # 1 Gbit/s: what an equal share is written as


def replicate(
    spec: RunSpec,
    *,
    version: int,
    members: Sequence[str],
    shares: Mapping[str, float],
    previous: Plan | None,
    head_round: int,
    layers: int,
    base: Base,
    issued_unix_ms: int,
    reason: str,
) -> Plan:
    """The plan `version` for `members` (peer ids, at least one) of a model with that many layers.

    It follows `previous`; `head_round` is the newest committed round, 0 for none; `shares` are what each reduces.
    """
    ordered = sorted(members)
    holdings = {} if head_round else _holdings(ordered, previous, first_lease_samples(spec))
    return Plan(
        run_id=spec.run.name,
        version=version,
        assignments=tuple(
            Assignment(
                peer_id=peer,
                first_layer=0,
                last_layer=layers - 1,
                data_ranges=holdings.get(peer, ()),
                max_round_tokens=most_round_tokens(spec, len(ordered)),
                max_reduce_bytes_per_second=round(shares[peer] * len(ordered) * REDUCE_BYTES_PER_SECOND),
            )
            for peer in ordered
        ),
        routes=tuple((peer,) for peer in ordered),
        base=base,
        issued_unix_ms=issued_unix_ms,
        reason=reason,
    )


def _holdings(members: Sequence[str], previous: Plan | None, samples_each: int) -> Mapping[str, tuple[Range, ...]]:
    """First samples: as `previous` has them, and for newcomers what follows the highest that it dealt out.

    What leavers held stays a gap; the first committed round hands it out again.
    """
    kept = {item.peer_id: item.data_ranges for item in previous.assignments if item.data_ranges} if previous else {}
    cursor = max((end for ranges in kept.values() for _, end in ranges), default=0)
    newcomers = [peer for peer in members if peer not in kept]
    first = {peer: ((cursor + i * samples_each, cursor + (i + 1) * samples_each),) for i, peer in enumerate(newcomers)}
    return {**kept, **first}


def most_round_tokens(spec: RunSpec, members: int) -> int:
    """What one member may claim in a round: all that make it due.

    Where fragments take turns, it claims what it trained over all their rounds, each of which comes a little late and
    no sooner than every member has made a step.
    """
    sync = spec.sync
    if sync.fragments == 1:
        return sync.round_tokens
    return 2 * max(sync.round_tokens, sync.fragments * members * spec.tokens_per_step)


def first_lease_samples(spec: RunSpec) -> int:
    """What each member starts with: enough for some rounds even if it trained every token alone."""
    return LEASE_ROUNDS * -(-spec.sync.round_tokens // spec.data.sequence_length)
