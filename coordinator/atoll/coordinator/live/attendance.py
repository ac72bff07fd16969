"""Attendance of a run: the nodes that may be in its plan now, and the reasons why others may not. Pure.

Plan upkeep, the planner's question and backup spans use an `Attendance`. The admin service shows the reasons. This
module also decides which corpus digest counts before genesis: the one that most eligible nodes share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from atoll.coordinator.sanitize import enum_word
from atoll.coordinator.state import deciding
from atoll.coordinator.state.known_nodes import known_nodes
from atoll.coordinator.state.run_memory import PlanJoins, RunMemory
from atoll.coordinator.state.snapshot import LiveNode, State
from atoll.coordinator.store.records import Node
from atoll.core.fragments import fragment_count
from atoll.core.node_reasons import is_failure, named_reason, reason_words
from atoll.core.plan import Plan
from atoll.v1 import membership_pb2 as mb

STAGE_LOADING_TIMEOUT_SECONDS = 45.0  # for a restarted stage to load its layers, or to report a state
DRAIN_SECONDS = 45.0  # longer than a draining node waits for its last round
REST_SECONDS = 60.0  # at least, for the last round of a paused node
# before a node may join the plan again, by its number of recent joins
REJOIN_DELAYS_SECONDS = (0.0, 0.0, 2.0, 8.0, 30.0)
JOINS_FORGOTTEN_SECONDS = 600.0
ELIGIBLE_STATES = (mb.NODE_STATE_READY, mb.NODE_STATE_CATCHING_UP, mb.NODE_STATE_TRAINING)
PINNED_OUT = "out"  # value of a pin: excluded from training


@dataclass(frozen=True)
class Attendance:
    """The nodes that may be in a run's plan: peer ids, each tuple ordered.

    `awaited` nodes return or count as lost within seconds: a planned node that just lost its stream; one that finished
    before the coordinator received the last round; a restarted stage that loads its layers.
    """

    eligible: tuple[str, ...]
    awaited: tuple[str, ...]  # in the plan, and expected back
    finishing: tuple[str, ...]  # in the plan until their last round (draining or paused); no new plan should use them

    @cached_property
    def members(self) -> tuple[str, ...]:
        """All of them, ordered."""
        return tuple(sorted(self.present_peers))

    @cached_property
    def plannable(self) -> frozenset[str]:
        """The nodes that a new plan may use."""
        return frozenset((*self.eligible, *self.awaited))

    @cached_property
    def present_peers(self) -> frozenset[str]:
        """All of them, as a set."""
        return frozenset((*self.eligible, *self.awaited, *self.finishing))


def attendance_of(state: State, run_id: str, now: float) -> Attendance:
    """Compute the attendance of a run at `now` (monotonic)."""
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
    electorate = deciding.next_electorate(state, run_id)
    voters = electorate.members if electorate is not None else frozenset()
    finishing = [node.peer_id for node in rest if _finishing(state, node, now) or _is_resting(state, node, voters, now)]
    return Attendance(tuple(sorted(eligible)), tuple(awaited), tuple(finishing))


def eligible_nodes(state: State, run_id: str) -> list[str]:
    """Peer ids of the connected nodes with the run's corpus that train or could train, ordered."""
    return ready_nodes(state, run_id, corpus_expected(state, run_id))


def ready_count(state: State, run_id: str) -> int:
    """Number of nodes with the same corpus that train or could train; compared with `min_nodes`."""
    return len(ready_nodes(state, run_id, corpus_expected(state, run_id) or most_common_corpus(state, run_id)))


def uncounted(state: State, run_id: str) -> list[str]:
    """Describe the connected nodes of the run that do not count as ready, with the reason, ordered by name."""
    digest = corpus_expected(state, run_id) or most_common_corpus(state, run_id)
    found = []
    for node in state.members_of(run_id):
        live = state.live.get(node.peer_id)
        if "node" not in node.roles or live is None or not live.connected:
            continue
        if not _is_eligible(state, node):
            found.append(f"{node.name} {_why_absent(state, node.peer_id)}")
        elif live.corpus_digest != digest:
            why = "has another corpus" if live.corpus_digest else "has not reported its corpus digest yet"
            found.append(f"{node.name} {why}")
    return sorted(found)


def ready_nodes(state: State, run_id: str, digest: str) -> list[str]:
    """Peer ids of the eligible nodes with that corpus, ordered."""
    return [peer for peer in _eligible(state, run_id) if state.live[peer].corpus_digest == digest]


def only_strangers_are_there(state: State, run_id: str) -> bool:
    """Whether the run waits for known nodes: all eligible nodes are on probation, but it also has others."""
    eligible = _eligible(state, run_id)
    return bool(eligible) and not known_nodes(state, eligible)


def _eligible(state: State, run_id: str) -> list[str]:
    return [node.peer_id for node in state.members_of(run_id) if _is_eligible(state, node)]


def corpus_expected(state: State, run_id: str) -> str:
    """Digest that every node's corpus must have; empty while it is undecided."""
    run = state.runs[run_id]
    return run.corpus_digest if run.genesis or run.state == "GENESIS" else ""


def most_common_corpus(state: State, run_id: str) -> str:
    """Corpus digest that most eligible nodes share; in a tie, that of the lowest peer id."""
    digests = Counter(state.live[peer].corpus_digest for peer in known_nodes(state, _eligible(state, run_id)))
    digests.pop("", None)
    return max(digests, key=lambda digest: digests[digest], default="")


def nodes_with_other_corpus(state: State, run_id: str, digest: str) -> Iterable[tuple[Node, str]]:
    """Eligible nodes with another corpus than `digest`, each with its own digest."""
    for node in state.members_of(run_id):
        other = state.live[node.peer_id].corpus_digest if _is_eligible(state, node) else ""
        if other and other != digest:
            yield node, other


def corpus_notice(state: State, node: Node) -> str:
    """Notice for a node whose corpus differs from that of most nodes, before genesis; empty for other nodes.

    After genesis, the stream of such a node ends instead. This function is called for all nodes at every change, so it
    reads the most common digest from memory instead of counting.
    """
    live = state.live.get(node.peer_id)
    if live is None or not live.corpus_digest or corpus_expected(state, node.run_id):
        return ""
    usual = state.memory[node.run_id].most_common_corpus_digest
    if usual in ("", live.corpus_digest):
        return ""
    own = live.corpus_digest[:12]
    return f"its corpus ({own}…) differs from that of most nodes ({usual[:12]}…): the node does not count as ready"


def can_still_write_genesis(state: State, run_id: str, peer_id: str) -> bool:
    """True while the writer of genesis may still deliver: it should train, and is connected or was until recently."""
    node, live = state.nodes[peer_id], state.live.get(peer_id)
    return (
        should_train(node)
        and node.run_id == run_id
        and live is not None
        and not live.counted_as_lost
        and (not live.connected or live.status.state in ELIGIBLE_STATES)
    )


def may_join(memory: RunMemory, peer_id: str, now: float) -> bool:
    """True if a node may join the plan now. The delay grows with the number of its recent joins."""
    plan_joins = memory.plan_joins.get(peer_id, PlanJoins())
    wait = REJOIN_DELAYS_SECONDS[min(plan_joins.count, len(REJOIN_DELAYS_SECONDS) - 1)]
    return now - plan_joins.at >= wait


def count_join(memory: RunMemory, peer_id: str, now: float) -> PlanJoins:
    """Count one more join of a node into the plan."""
    return PlanJoins(recent_joins(memory, peer_id, now) + 1, now)


def recent_joins(memory: RunMemory, peer_id: str, now: float) -> int:
    """Number of a node's joins into the plan; 0 once the last one is `JOINS_FORGOTTEN_SECONDS` old."""
    plan_joins = memory.plan_joins.get(peer_id, PlanJoins())
    return plan_joins.count if now - plan_joins.at < JOINS_FORGOTTEN_SECONDS else 0


def live_of(state: State, peer: str) -> LiveNode:
    """The live record of a node; an empty one if the coordinator has not heard from it."""
    return state.live.get(peer) or LiveNode(session=0, last_message_at=0.0)


def should_train(node: Node) -> bool:
    """True if neither the operator nor the node itself excluded it from training."""
    return "node" in node.roles and node.pin != PINNED_OUT and not (node.banned or node.left or node.draining)


def membership_change(state: State, before: tuple[str, ...], after: Iterable[str]) -> str:
    """Describe which nodes joined a plan and which left it, and why."""
    later = list(after)
    joined = [state.nodes[peer].name for peer in later if peer not in before]
    gone = [f"{state.nodes[peer].name} {_why_absent(state, peer)}" for peer in before if peer not in later]
    return "; ".join([f"{name} joins" for name in joined] + gone)


def _why_absent(state: State, peer_id: str) -> str:
    node, live = state.nodes[peer_id], state.live.get(peer_id)
    ended = named_reason(node.ended)
    for gone, word in (
        (bool(node.replaced_by), "has a new identity"),
        (node.banned, "was banned"),
        (node.left and is_failure(ended), f"failed ({reason_words(ended)})"),
        (node.left, "left"),
        (node.draining, "drains"),
        (node.pin == PINNED_OUT, "is pinned out"),
    ):
        if gone:
            return word
    if live is None or live.counted_as_lost:
        return "was lost"
    if live.status.state in ELIGIBLE_STATES:
        return "is left out"
    return f"is {enum_word(mb.NodeState.DESCRIPTOR, live.status.state).replace('_', ' ')}"


def _is_eligible(state: State, node: Node) -> bool:
    live = state.live.get(node.peer_id)
    return should_train(node) and live is not None and live.connected and live.status.state in ELIGIBLE_STATES


def _finishing(state: State, node: Node, now: float) -> bool:
    """True while a draining node takes part in its last round, for at most `DRAIN_SECONDS`."""
    live = state.live.get(node.peer_id)
    if live is None or live.counted_as_lost or not node.draining or node.banned or node.left:
        return False
    in_time = live.drain_since is not None and now - live.drain_since < DRAIN_SECONDS
    in_time |= live.handing_over
    return in_time and (not live.connected or live.status.state in ELIGIBLE_STATES)


def _is_resting(state: State, node: Node, voters: frozenset[str], now: float) -> bool:
    """True for a paused replica until its last rounds, one of each fragment, have committed or timed out.

    `voters` decide the next round; the node's last round does not name it as one. A paused stage of a longer route
    stops the whole route, so it is replaced at once, and `quorum_guard` keeps its vote.
    """
    live, memory = state.live.get(node.peer_id), state.memory[node.run_id]
    plan = memory.plan
    if live is None or live.counted_as_lost or live.status.state != mb.NODE_STATE_PAUSED or live.unfit_since is None:
        return False
    if plan is None or not plan.is_replica(node.peer_id) or not should_train(node):
        return False
    if now - live.unfit_since >= max(REST_SECONDS, 2 * memory.spec.sync.round_max_seconds.total_seconds()):
        return False
    turns = fragment_count(memory.spec.sync.fragments, plan.layers, len(plan.cuts))
    return state.runs[node.run_id].head_round < live.unfit_round + turns or node.peer_id in voters


def _is_loading_stage(state: State, plan: Plan | None, peer_id: str, now: float) -> bool:
    """True for a restarted stage that loads its layers: without this wait, its whole route would lose its place."""
    live = state.live.get(peer_id)
    stage = plan is not None and peer_id in plan.stages and not plan.is_replica(peer_id)
    joining = live is not None and live.connected and live.status.state == mb.NODE_STATE_JOINING
    return stage and joining and live is not None and _within_loading_timeout(live, now)


def _within_loading_timeout(live: LiveNode, now: float) -> bool:
    return live.unfit_since is None or now - live.unfit_since < STAGE_LOADING_TIMEOUT_SECONDS


def _may_return(state: State, peer_id: str, now: float) -> bool:
    """True for a node that just disconnected, and for a while for one that has finished or reports no state."""
    live = state.live.get(peer_id)
    if live is None or live.counted_as_lost:
        return False
    waits = live.status.state in (mb.NODE_STATE_FINISHED, mb.NODE_STATE_UNSPECIFIED)
    return not live.connected or (waits and _within_loading_timeout(live, now))
