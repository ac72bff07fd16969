"""Nodes whose number counts: those that are not on probation. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import Node


def is_on_probation(state: State, peer: str) -> bool:
    """Whether a node weighs little in rounds, and decides nothing while there are others."""
    node = state.nodes.get(peer)
    return node is not None and node.on_probation


def known_nodes(state: State, peers: Iterable[str]) -> list[str]:
    """Those of `peers` that are not on probation, or all if the run never had another node that is not banned.

    Nodes that left count, and those that moved to another run: they may return, and strangers shall not have their run
    meanwhile. Until a run has its genesis, nodes that are on their way to it count, too: strangers may move faster.
    """
    peers = list(peers)
    runs = {state.nodes[peer].run_id for peer in peers if peer in state.nodes}
    others = (node for node in state.nodes.values() if _homes(state, node) & runs and "node" in node.roles)
    if all(node.on_probation or node.banned for node in others):
        return peers
    return [peer for peer in peers if not is_on_probation(state, peer)]


def _homes(state: State, node: Node) -> set[str]:
    """The runs whose known node it is, if it is no stranger."""
    going = state.runs.get(node.assigned_run)
    return {node.run_id, node.moved_from} | ({going.run_id} if going is not None and not going.genesis else set())
