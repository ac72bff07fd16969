"""Which nodes may be part of a plan now, and in which words people are told why others are not. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from atoll.coordinator.sanitize import enum_word
from atoll.coordinator.state.snapshot import LiveNode, PlanJoins, RunMemory, State
from atoll.coordinator.store.records import Node
from atoll.core.plan import Plan
from atoll.v1 import membership_pb2 as mb

STAGE_LOADING_TIMEOUT_SECONDS = (
    45.0  # that a stage which was started again is waited for while it loads its layers, or says nothing
)
DRAIN_SECONDS = 45.0  # more than a draining node waits for its last round
REJOIN_DELAYS_SECONDS = (0.0, 0.0, 2.0, 8.0, 30.0)  # between comings into the plan, by how many there were lately
JOINS_FORGOTTEN_SECONDS = 600.0
ELIGIBLE_STATES = (mb.NODE_STATE_READY, mb.NODE_STATE_CATCHING_UP, mb.NODE_STATE_TRAINING)
PINNED_OUT = "out"  # a pin: no part in training


@dataclass(frozen=True)
class Attendance:
    """Who may have a part in a run's plan: peer ids, each ordered.

    A planned node that only just lost its stream stays, and so does one that is done before we heard of the last round,
    and a stage that was started again and loads its layers: all of these come back or end by themselves within seconds.
    """

    eligible: tuple[str, ...]
    awaited: tuple[str, ...]  # planned
    finishing: tuple[str, ...]  # planned; a new plan should not count on them

    @cached_property
    def members(self) -> tuple[str, ...]:
        """All of them, ordered."""
        return tuple(sorted(self.present_peers))

    @cached_property
    def present_peers(self) -> frozenset[str]:
        """The same, to look for one."""
        return frozenset((*self.eligible, *self.awaited, *self.finishing))


def attendance_of(state: State, run_id: str, now: float) -> Attendance:
    """As of now (monotonic)."""
    memory, digest = state.memory[run_id], corpus_expected(state, run_id)
    planned = frozenset(memory.plan.members if memory.plan else ())
    nodes = state.members_of(run_id)
    eligible = {
        node.peer_id
        for node in nodes
        if _is_eligible(state, node)
        and state.live[node.peer_id].corpus_digest == digest
        and (node.peer_id in planned or may_join(memory, node.peer_id, now))
    }
    rest = [node for node in nodes if node.peer_id in planned and node.peer_id not in eligible]
    awaited = [
        node.peer_id
        for node in rest
        if should_train(node)
        and (_may_return(state, node.peer_id, now) or _is_loading_stage(state, memory.plan, node.peer_id, now))
    ]
    finishing = [node.peer_id for node in rest if _finishing(state, node, now)]
    return Attendance(tuple(sorted(eligible)), tuple(awaited), tuple(finishing))


def eligible_nodes(state: State, run_id: str) -> list[str]:
    """Peer ids of the connected nodes with the run's text that train or could, ordered."""
    return ready_nodes(state, run_id, corpus_expected(state, run_id))


def ready_count(state: State, run_id: str) -> int:
    """How many nodes with the same text could start or do train: what `min_nodes` is compared with."""
    return len(ready_nodes(state, run_id, corpus_expected(state, run_id) or most_common_corpus(state, run_id)))


def uncounted(state: State, run_id: str) -> list[str]:
    """Connected nodes of the run that do not count as ready, and why, ordered by name."""
    digest = corpus_expected(state, run_id) or most_common_corpus(state, run_id)
    found = []
    for node in state.members_of(run_id):
        live = state.live.get(node.peer_id)
        if "node" not in node.roles or live is None or not live.connected:
            continue
        if not _is_eligible(state, node):
            found.append(f"{node.name} {_why_absent(state, node.peer_id)}")
        elif live.corpus_digest != digest:
            said = "has another text" if live.corpus_digest else "has told nothing of its text yet"
            found.append(f"{node.name} {said}")
    return sorted(found)


def ready_nodes(state: State, run_id: str, digest: str) -> list[str]:
    """Peer ids of the fit nodes with that text, ordered."""
    return [
        node.peer_id
        for node in state.members_of(run_id)
        if _is_eligible(state, node) and state.live[node.peer_id].corpus_digest == digest
    ]


def corpus_expected(state: State, run_id: str) -> str:
    """The digest that every node's corpus must have; empty while it is undecided."""
    run = state.runs[run_id]
    return run.corpus_digest if run.genesis or run.state == "GENESIS" else ""


def most_common_corpus(state: State, run_id: str) -> str:
    """The digest most fit nodes share; of equals, that of the lowest peer id."""
    digests = Counter(
        state.live[node.peer_id].corpus_digest for node in state.members_of(run_id) if _is_eligible(state, node)
    )
    digests.pop("", None)
    return max(digests, key=lambda digest: digests[digest], default="")


def nodes_with_other_corpus(state: State, run_id: str, digest: str) -> Iterable[tuple[Node, str]]:
    """Fit nodes with another text than that, and which."""
    for node in state.members_of(run_id):
        other = state.live[node.peer_id].corpus_digest if _is_eligible(state, node) else ""
        if other and other != digest:
            yield node, other


def corpus_notice(state: State, node: Node) -> str:
    """What a node is told whose text is not that of most, before genesis; later its stream ends. Empty otherwise.

    All nodes are asked about at every change, so nothing is counted here.
    """
    live = state.live.get(node.peer_id)
    if live is None or not live.corpus_digest or corpus_expected(state, node.run_id):
        return ""
    usual = state.memory[node.run_id].most_common_corpus_digest
    if usual in ("", live.corpus_digest):
        return ""
    return f"its text ({live.corpus_digest[:12]}…) is not that of the other nodes ({usual[:12]}…): it does not count"


def can_still_write_genesis(state: State, peer_id: str) -> bool:
    """Whether the writer may still deliver: connected or only just gone, and neither unfit nor unwanted."""
    node, live = state.nodes[peer_id], state.live.get(peer_id)
    return (
        should_train(node)
        and live is not None
        and not live.lost
        and (not live.connected or live.status.state in ELIGIBLE_STATES)
    )


def may_join(memory: RunMemory, peer_id: str, now: float) -> bool:
    """Whether a node may come into the plan: at once at first, and ever later the more often it comes and goes."""
    plan_joins = memory.plan_joins.get(peer_id, PlanJoins())
    wait = REJOIN_DELAYS_SECONDS[min(plan_joins.count, len(REJOIN_DELAYS_SECONDS) - 1)]
    return now - plan_joins.at >= wait


def count_join(memory: RunMemory, peer_id: str, now: float) -> PlanJoins:
    """Once more."""
    plan_joins = memory.plan_joins.get(peer_id, PlanJoins())
    lately = plan_joins.count if now - plan_joins.at < JOINS_FORGOTTEN_SECONDS else 0
    return PlanJoins(lately + 1, now)


def should_train(node: Node) -> bool:
    """Whether the operator and the node itself would have it train."""
    return "node" in node.roles and node.pin != PINNED_OUT and not (node.banned or node.left or node.draining)


def membership_change(state: State, before: tuple[str, ...], after: Iterable[str]) -> str:
    """Who came into a plan and who went, and why."""
    later = list(after)
    came = [state.nodes[peer].name for peer in later if peer not in before]
    went = [f"{state.nodes[peer].name} {_why_absent(state, peer)}" for peer in before if peer not in later]
    return "; ".join([f"{name} joins" for name in came] + went)


def _why_absent(state: State, peer_id: str) -> str:
    node, live = state.nodes[peer_id], state.live.get(peer_id)
    for gone, word in (
        (node.banned, "was banned"),
        (node.left, "left"),
        (node.draining, "drains"),
        (node.pin == PINNED_OUT, "is pinned out"),
    ):
        if gone:
            return word
    if live is None or live.lost:
        return "was lost"
    if live.status.state in ELIGIBLE_STATES:
        return "is left out"
    return f"is {enum_word(mb.NodeState.DESCRIPTOR, live.status.state).replace('_', ' ')}"


def _is_eligible(state: State, node: Node) -> bool:
    live = state.live.get(node.peer_id)
    return should_train(node) and live is not None and live.connected and live.status.state in ELIGIBLE_STATES


def _finishing(state: State, node: Node, now: float) -> bool:
    """A node that the operator drains is part of its last round, for a while, until it says that it is done."""
    live = state.live.get(node.peer_id)
    if live is None or live.lost or not node.draining or node.banned or node.left:
        return False
    in_time = live.drain_since is not None and now - live.drain_since < DRAIN_SECONDS
    in_time |= live.handing_over
    return in_time and (not live.connected or live.status.state in ELIGIBLE_STATES)


def _is_loading_stage(state: State, plan: Plan | None, peer_id: str, now: float) -> bool:
    """A stage that came back just now: without it its whole route would have no place."""
    live = state.live.get(peer_id)
    stage = plan is not None and peer_id in plan.stages and not plan.is_replica(peer_id)
    joining = live is not None and live.connected and live.status.state == mb.NODE_STATE_JOINING
    return stage and joining and live is not None and _within_loading_timeout(live, now)


def _within_loading_timeout(live: LiveNode, now: float) -> bool:
    return live.unfit_since is None or now - live.unfit_since < STAGE_LOADING_TIMEOUT_SECONDS


def _may_return(state: State, peer_id: str, now: float) -> bool:
    """Who lost its stream, until it counts as lost; who says that it is done, or nothing yet, for a while."""
    live = state.live.get(peer_id)
    if live is None or live.lost:
        return False
    waits = live.status.state in (mb.NODE_STATE_FINISHED, mb.NODE_STATE_UNSPECIFIED)
    return not live.connected or (waits and _within_loading_timeout(live, now))
