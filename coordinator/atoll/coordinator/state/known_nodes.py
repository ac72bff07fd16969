"""Known nodes: those that are not on probation. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import Node


def is_on_probation(state: State, peer: str) -> bool:
    """Whether a node is on probation: it weighs little in rounds and decides nothing while there are other members."""
    node = state.nodes.get(peer)
    return node is not None and node.on_probation


def known_nodes(state: State, peers: Iterable[str]) -> list[str]:
    """The `peers` that are not on probation; all of them if the run never had another node that is not banned.

    Nodes that left or moved to another run still count as others: they may return, and until then nodes on probation
    must not take over the run. Before genesis, nodes assigned to the run also count, because nodes on probation may
    arrive earlier.
    """
    peers = list(peers)
    runs = {state.nodes[peer].run_id for peer in peers if peer in state.nodes}
    others = (node for node in state.nodes.values() if _homes(state, node) & runs and "node" in node.roles)
    if all(node.on_probation or node.banned for node in others):
        return peers
    return [peer for peer in peers if not is_on_probation(state, peer)]


def _homes(state: State, node: Node) -> set[str]:
    """The runs for which this node counts as one of the others in `known_nodes`."""
    going = state.runs.get(node.assigned_run)
    return {node.run_id, node.moved_from} | ({going.run_id} if going is not None and not going.genesis else set())
