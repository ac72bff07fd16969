"""Nodes whose word about themselves is far from what others see: told to people once, shown while it is so. Pure.

The planner finds them (`planner/measured.py`) and goes by what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.coordinator.state.snapshot import Draft


def tell(draft: Draft, run_id: str, by_name: Mapping[str, str]) -> None:
    """What the planner doubts now, by the names of nodes."""
    memory = draft.state.memory[run_id]
    doubted = {node.peer_id: by_name[node.name] for node in draft.state.members_of(run_id) if node.name in by_name}
    for peer in sorted(doubted.keys() - memory.doubted.keys()):
        draft.event("node.doubted", run_id, peer, f"{doubted[peer]}: plans go by what was measured")
    if doubted != memory.doubted:
        draft.remember(run_id, doubted=doubted)
