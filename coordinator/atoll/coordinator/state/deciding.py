"""Who can decide the round after the newest one that is known here. Pure.

`live/quorum_guard.py` uses this for every plan before it is issued. `live/plan_spacing.py` uses it to see whether the
remaining members of the current plan can still decide. The rule itself is in `core/quorum.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from atoll.coordinator.state.known_nodes import known_nodes
from atoll.coordinator.state.run_memory import RunMemory, electorate_after
from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import Run
from atoll.core.quorum import COORDINATOR, Electorate
from atoll.v1 import membership_pb2 as mb

VOTING_STATES = frozenset(
    {
        mb.NODE_STATE_JOINING,  # a restarted member votes once it has loaded
        mb.NODE_STATE_READY,
        mb.NODE_STATE_CATCHING_UP,
        mb.NODE_STATE_TRAINING,
        mb.NODE_STATE_PAUSED,
    }
)


def next_electorate(state: State, run_id: str) -> Electorate | None:
    """Electorate of the round after the newest known one; None before genesis."""
    return electorate_after(state.memory[run_id], state.runs[run_id].head_round)


def decides(state: State, run_id: str, electorate: Electorate, peers: Iterable[str]) -> bool:
    """True if `peers` are a quorum, with the coordinator's vote unless it abstains."""
    return electorate.decides({*peers, *coordinator_vote(state, run_id)})


def coordinator_vote(state: State, run_id: str) -> frozenset[str]:
    """The coordinator's seat if it votes; empty if it abstains."""
    return frozenset() if abstains(state.runs[run_id], state.memory[run_id]) else frozenset({COORDINATOR})


def can_vote(state: State, run_id: str, peer: str) -> bool:
    """True for a connected member that would vote under a plan that names it, whether or not it may train."""
    node, live = state.nodes.get(peer), state.live.get(peer)
    if node is None or live is None or node.run_id != run_id:  # a member of the plan may be in another run by now
        return False
    if node.banned or node.left or "node" not in node.roles:
        return False
    return live.connected and live.status.state in VOTING_STATES


def is_behind(state: State, run_id: str) -> bool:
    """True if most connected members of the plan report a newer round than the coordinator knows.

    Then the coordinator does not know who decides the next round.
    """
    plan, known = state.memory[run_id].plan, state.runs[run_id].head_round
    members = [
        peer
        for peer in known_nodes(state, plan.members if plan else ())
        if peer in state.nodes and state.nodes[peer].run_id == run_id
    ]
    lives = [live for peer in members if (live := state.live.get(peer)) and live.connected]
    return 2 * sum(live.status.head_round > known for live in lives) > len(lives)


def abstains(run: Run, memory: RunMemory) -> bool:
    """True after a restore until a round of a newer plan has committed, because forgotten votes may still matter."""
    since_restore = max((commit.plan_version for commit in memory.committed.values()), default=0)
    recovered = memory.bases[-1].since_version if memory.bases else 0
    return max(since_restore, recovered) <= run.plan_floor and run.plan_floor > 0
