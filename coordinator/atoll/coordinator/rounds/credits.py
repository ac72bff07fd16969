"""What each node contributed to a run: counted once from each committed round, kept under its newest identity. Pure.

A manifest says how many tokens count for each contribution: what the member claimed, at most the plan's cap, if the
seats accepted it. Credit survives restarts of the node and of the coordinator. All credits of a run add up to its
committed tokens, except for recoveries and skipped rounds. A round that a recovery made void keeps its credit, because
the work was done. A member on probation gets rounds and no tokens, as in the run's own count.

One row, with the empty peer id, is left of all nodes that the operator forgot. A peer that the coordinator does not
know, after a restore, keeps a row of its own until it enrols again.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from atoll.coordinator.state import lookup
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import MAX_INTEGER, Credit, Node
from atoll.v1 import manifest_pb2

FORGOTTEN = ""  # stands for the peer ids of all forgotten nodes


def count_round(draft: Draft, run_id: str, manifest: manifest_pb2.Manifest, unix_ms: int) -> None:
    """Credit the contributions of a round that committed at `unix_ms`. Call this once for each round."""
    credits = dict(draft.state.memory[run_id].credits)
    for item in manifest.contributions:
        if item.weight:
            peer = _owner(draft.state, item.peer_id)
            _add(credits, Credit(run_id, peer, item.tokens, 1, unix_ms, unix_ms))
    draft.set_credits(run_id, credits)


def move(draft: Draft, old: Node, new: Node) -> None:
    """Move the old identity's credits to the new one, in all runs."""
    _rename(draft, {old.peer_id: new.peer_id})


def fold(draft: Draft, peer_ids: Set[str]) -> None:
    """Add the credits of these nodes to the row of all forgotten nodes, in all runs."""
    _rename(draft, dict.fromkeys(peer_ids, FORGOTTEN))


def _rename(draft: Draft, names: Mapping[str, str]) -> None:
    for run_id, memory in draft.state.memory.items():
        if names.keys().isdisjoint(memory.credits):
            continue
        credits: dict[str, Credit] = {}
        for peer, item in memory.credits.items():
            _add(credits, replace(item, peer_id=names.get(peer, peer)))
        draft.set_credits(run_id, credits)


def _owner(state: State, peer_id: str) -> str:
    """The peer id under which a contribution is credited."""
    node = state.nodes.get(peer_id)
    if node is not None:
        return lookup.newest(state, node).peer_id
    return FORGOTTEN if peer_id in state.forgotten else peer_id


def _add(credits: dict[str, Credit], more: Credit) -> None:
    before = credits.get(more.peer_id)
    if before is not None:
        more = replace(
            more,
            tokens=min(before.tokens + more.tokens, MAX_INTEGER),
            rounds=before.rounds + more.rounds,
            first_ms=min(before.first_ms, more.first_ms),
            last_ms=max(before.last_ms, more.last_ms),
        )
    credits[more.peer_id] = more
