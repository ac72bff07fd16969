"""The life of a run: from created over genesis to training and its end, and when a new plan is due. Pure.

    CREATED → WAITING → GENESIS → TRAINING → FINISHED
                 ↖________|           ↕
                                   PAUSED          any but FINISHED → STOPPED

`advance` moves a run as far as what is known now allows; the operator's orders are the other edges. A run
that trains follows its nodes: whoever is fit to train is in the plan, and when that set changes and stays
changed for the debounce, the next plan is issued. An empty plan is never issued: nodes keep the last.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from atoll.coordinator.planner.replicas import replicate
from atoll.coordinator.planner.shares import WORTH, Link, best_shares, gain, needs_relay
from atoll.coordinator.state import find
from atoll.coordinator.state.records import Node, Run
from atoll.coordinator.state.snapshot import Draft, Joins, Moment, Policy, RunMemory, State, Step
from atoll.coordinator.text import enum_word
from atoll.core.errors import AlreadyExists, InvalidTransition, RunSpecError
from atoll.core.manifest import manifest_hash
from atoll.core.plan import Base, Plan
from atoll.core.run_spec import parse_run_spec
from atoll.v1 import manifest_pb2, plan_pb2
from atoll.v1 import membership_pb2 as mb

EDGES: dict[str, frozenset[str]] = {
    "CREATED": frozenset({"WAITING", "STOPPED"}),
    "WAITING": frozenset({"GENESIS", "PAUSED", "STOPPED"}),
    "GENESIS": frozenset({"WAITING", "TRAINING", "PAUSED", "STOPPED"}),
    "TRAINING": frozenset({"PAUSED", "FINISHED", "STOPPED"}),
    "PAUSED": frozenset({"WAITING", "TRAINING", "FINISHED", "STOPPED"}),
    "FINISHED": frozenset(),
    "STOPPED": frozenset(),
}
DRAIN_SECONDS = 45.0  # more than a draining node waits for its last round
REJOIN_SECONDS = (0.0, 0.0, 2.0, 8.0, 30.0)  # between comings into the plan, by how many there were lately
JOINS_FORGOTTEN_SECONDS = 600.0
MAX_UPLINK = 1e12  # bytes per second
FIT = (mb.NODE_STATE_READY, mb.NODE_STATE_CATCHING_UP, mb.NODE_STATE_TRAINING)


def create_run(state: State, now: Moment, spec_toml: str, *, start: bool) -> Step[Run]:
    """A run from a spec. Raises `RunSpecError`, `AlreadyExists`."""
    spec = parse_run_spec(spec_toml)
    stored = spec.resolved_toml()
    if parse_run_spec(stored, "the spec with its defaults") != spec:  # or the next start could not read it
        raise RunSpecError("the run spec changes when it is written out with its defaults", "simplify its strings")
    name = spec.run.name
    if name in state.runs:
        raise AlreadyExists(f"there is a run called {name!r} already", "give the new one another run.name")
    draft = Draft(state, now)
    draft.put(Run(run_id=name, spec_toml=stored, state="CREATED", created_ms=now.unix_ms))
    draft.add_memory(name, RunMemory(spec=spec))
    draft.event("run.created", name, name, f"run {name} created: {spec.run.stop_tokens} tokens")
    if start:
        _move(draft, name, "WAITING", "the run was started")
    return draft.done(draft.state.runs[name])


def start(state: State, now: Moment, run_id: str, policy: Policy) -> Step[Run]:
    """Start a created run, or go on with a paused one. Raises `NotFound`, `InvalidTransition`."""
    run = find.run(state, run_id)
    draft = Draft(state, now)
    if run.state not in ("CREATED", "PAUSED"):
        raise InvalidTransition(
            f"run {run.run_id!r} is {run.state.lower()}: only a created or paused run can be started",
            "see `atollctl run show`",
        )
    resumed = run.state == "PAUSED"
    _move(draft, run.run_id, "TRAINING" if run.genesis else "WAITING", "the run goes on" if resumed else "started")
    draft.remember(run.run_id, hold_until=now.monotonic + policy.resume_seconds, changed_since=None)
    return draft.done(draft.state.runs[run.run_id])


def pause(state: State, now: Moment, run_id: str) -> Step[Run]:
    """Let the nodes wait. Raises `NotFound`, `InvalidTransition`."""
    return _ordered(state, now, run_id, "PAUSED", "the operator paused the run")


def stop(state: State, now: Moment, run_id: str) -> Step[Run]:
    """End the run for good. Raises `NotFound`, `InvalidTransition`."""
    return _ordered(state, now, run_id, "STOPPED", "the operator stopped the run")


def finish_if_due(draft: Draft, run_id: str) -> None:
    """FINISHED, once the committed tokens are those that the spec asks for."""
    run, spec = draft.state.runs[run_id], draft.state.memory[run_id].spec
    if run.committed_tokens >= spec.run.stop_tokens and run.state in ("TRAINING", "PAUSED"):
        _move(draft, run_id, "FINISHED", f"the run reached {run.committed_tokens} tokens in {run.head_round} rounds")


def begin_training(draft: Draft, run_id: str) -> None:
    """Genesis is durable: issue plan 1 to every node that is ready for it."""
    state = draft.state
    ready = sorted({state.memory[run_id].writer, *fit_nodes(state, run_id)})
    issue(draft, run_id, ready, "the run begins")
    _move(draft, run_id, "TRAINING", f"training begins with {len(ready)} nodes")


def advance(draft: Draft, run_id: str, policy: Policy) -> None:
    """Move the run as far as the nodes allow."""
    match draft.state.runs[run_id].state:
        case "WAITING":
            _seek_genesis(draft, run_id)
        case "GENESIS":
            _watch_writer(draft, run_id, policy)
        case "TRAINING":
            _follow_members(draft, run_id, policy)


def ready_count(state: State, run_id: str) -> int:
    """How many nodes with the same text could start or do train: what `min_nodes` is compared with."""
    return len(_ready(state, run_id, corpus_expected(state, run_id) or _most_common_corpus(state, run_id)))


def fit_nodes(state: State, run_id: str) -> list[str]:
    """Peer ids of the connected nodes with the run's text that train or could, ordered."""
    return _ready(state, run_id, corpus_expected(state, run_id))


def next_version(run: Run) -> int:
    """Of the run's next plan: never one that was issued, not even one that a restore forgot."""
    return max(run.plan_version, run.plan_floor) + 1


def issue(draft: Draft, run_id: str, members: list[str], reason: str, base: Base | None = None) -> None:
    """The next plan, for these peer ids; `base` when it is a new one."""
    run, memory = draft.state.runs[run_id], draft.state.memory[run_id]
    genesis = manifest_hash(manifest_pb2.CommittedManifest.FromString(run.genesis).payload)
    plan = replicate(
        memory.spec,
        version=next_version(run),
        members=members,
        shares=best_shares(_links(draft.state, members)),
        previous=memory.plan,
        head_round=run.head_round,
        layers=len(plan_pb2.LayerTable.FromString(run.layers).layers),
        base=base or (memory.plan.base if memory.plan else Base(genesis, tuple(sorted(members)))),
        issued_unix_ms=draft.now.unix_ms,
        reason=reason,
    )
    planned = memory.plan.members if memory.plan else ()
    joins = {peer: _joined(memory, peer, draft.now.monotonic) for peer in members if peer not in planned}
    draft.put(replace(run, plan_version=plan.version))
    draft.remember(run_id, joins={**memory.joins, **joins})
    draft.issue_plan(plan)
    nodes = "1 node" if len(members) == 1 else f"{len(members)} nodes"
    draft.event("plan.issued", run_id, str(plan.version), f"plan {plan.version} for {nodes}: {reason}")


def corpus_expected(state: State, run_id: str) -> str:
    """The digest that every node's corpus must have; empty while it is undecided."""
    run = state.runs[run_id]
    return run.corpus_digest if run.genesis or run.state == "GENESIS" else ""


# --- waiting and genesis ---------------------------------------------------------------------------


def _seek_genesis(draft: Draft, run_id: str) -> None:
    state = draft.state
    needed = state.memory[run_id].spec.run.min_nodes
    digest = _most_common_corpus(state, run_id)
    ready = _ready(state, run_id, digest)
    if not digest or len(ready) < needed:
        _tell_corpora(draft, run_id, digest)
        return
    draft.put(replace(state.runs[run_id], corpus_digest=digest))
    _move(draft, run_id, "GENESIS", f"{len(ready)} of {needed} nodes are ready")
    _appoint(draft, run_id, ready)


def _watch_writer(draft: Draft, run_id: str, policy: Policy) -> None:
    state, memory = draft.state, draft.state.memory[run_id]
    ready = _ready(state, run_id, corpus_expected(state, run_id))
    in_time = draft.now.monotonic - memory.writer_since < policy.genesis_seconds
    may_deliver = memory.writer and memory.writer not in memory.passed_over and _still_there(state, memory.writer)
    if in_time and may_deliver:
        return
    if len(ready) >= memory.spec.run.min_nodes:
        nobody_else = memory.writer in ready and set(ready) <= memory.passed_over
        if not (in_time and nobody_else):
            _appoint(draft, run_id, ready)
        return
    draft.put(replace(state.runs[run_id], corpus_digest=""))
    draft.remember(run_id, writer="")
    _move(draft, run_id, "WAITING", "too few ready nodes are left to begin")


def _appoint(draft: Draft, run_id: str, ready: list[str]) -> None:
    """Ask the lowest peer id that was not asked in vain; when all were, start over."""
    memory = draft.state.memory[run_id]
    passed = memory.passed_over | ({memory.writer} if memory.writer else set())
    fresh = [peer for peer in ready if peer not in passed]
    writer = fresh[0] if fresh else ready[0]
    draft.remember(
        run_id,
        writer=writer,
        writer_since=draft.now.monotonic,
        passed_over=passed if fresh else frozenset(),
    )
    name = draft.state.nodes[writer].name
    draft.event("run.genesis-writer", run_id, writer, f"{name} writes the genesis anchor")


def _most_common_corpus(state: State, run_id: str) -> str:
    """The digest most fit nodes share; of equals, that of the lowest peer id."""
    digests = Counter(state.live[node.peer_id].corpus_digest for node in state.members_of(run_id) if _fit(state, node))
    digests.pop("", None)
    return max(digests, key=lambda digest: digests[digest], default="")


def _tell_corpora(draft: Draft, run_id: str, digest: str) -> None:
    """Say it, once per digest, when a fit node's text is not that of most: it does not count towards genesis."""
    state, memory = draft.state, draft.state.memory[run_id]
    for node in state.members_of(run_id):
        other = state.live[node.peer_id].corpus_digest if _fit(state, node) else ""
        if not other or other == digest or (node.peer_id, other) in memory.told_corpora:
            continue
        memory = replace(memory, told_corpora=memory.told_corpora | {(node.peer_id, other)})
        draft.remember(run_id, told_corpora=memory.told_corpora)
        told = f"{node.name} has the corpus {other[:12]}…, others have {digest[:12]}…: it does not count"
        draft.event("node.corpus-differs", run_id, node.peer_id, told)


def _ready(state: State, run_id: str, digest: str) -> list[str]:
    return [
        node.peer_id
        for node in state.members_of(run_id)
        if _fit(state, node) and state.live[node.peer_id].corpus_digest == digest
    ]


def _still_there(state: State, peer_id: str) -> bool:
    """Whether the writer may still deliver: connected or only just gone, and neither unfit nor unwanted."""
    node, live = state.nodes[peer_id], state.live.get(peer_id)
    return _wanted(node) and live is not None and not live.lost and (not live.connected or live.status.state in FIT)


# --- training --------------------------------------------------------------------------------------


def _follow_members(draft: Draft, run_id: str, policy: Policy) -> None:
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    if memory.plan is None or now < memory.hold_until:
        return
    members = _members(draft.state, run_id, now)
    run = draft.state.runs[run_id]
    forgotten = run.plan_floor >= memory.plan.version  # by a restore: nodes may follow a newer plan than ours
    if members and (tuple(members) != memory.plan.members or forgotten):
        why, patience = "members", policy.debounce_seconds
        reason = _difference(draft.state, memory.plan.members, members) or "the coordinator was restored from a backup"
    elif members and (times := gain(_links(draft.state, members), _reduce_rates(memory.plan))) > WORTH:
        why, patience = ("reach", policy.debounce_seconds) if math.isinf(times) else ("links", policy.shares_seconds)
        reason = "who reduces how much follows what nodes say of their links"
    else:
        if memory.changed_since is not None:
            draft.remember(run_id, changed_since=None)
        return
    if memory.changed_since is None or memory.changed_why != why:
        draft.remember(run_id, changed_since=now, changed_why=why)
    elif now - memory.changed_since >= patience:
        issue(draft, run_id, members, reason)


def _links(state: State, members: list[str]) -> dict[str, Link]:
    """What these nodes say of their links."""
    found = {}
    for peer in members:
        live = state.live.get(peer)
        said = live.status.uplink_bytes_per_second if live is not None else 0.0
        uplink = said if 0 < said <= MAX_UPLINK else 0.0  # false for NaN too
        found[peer] = Link(uplink, needs_relay(state.nodes[peer].multiaddrs))
    return found


def _reduce_rates(plan: Plan) -> dict[str, int]:
    return {item.peer_id: item.max_reduce_bytes_per_second for item in plan.assignments}


def _members(state: State, run_id: str, now: float) -> list[str]:
    """Peer ids that the plan should have now, ordered.

    A planned node that only just lost its stream stays, and so does one that is done before we heard of the
    last round: both would come back or end by themselves within seconds.
    """
    plan = state.memory[run_id].plan
    planned = plan.members if plan else ()
    digest = corpus_expected(state, run_id)
    return [
        node.peer_id
        for node in state.members_of(run_id)
        if (
            _fit(state, node)
            and state.live[node.peer_id].corpus_digest == digest
            and (node.peer_id in planned or _may_join(state.memory[run_id], node.peer_id, now))
        )
        or (node.peer_id in planned and _wanted(node) and _may_return(state, node.peer_id))
        or (node.peer_id in planned and _finishing(state, node, now))
    ]


def _may_join(memory: RunMemory, peer_id: str, now: float) -> bool:
    """Whether a node may come into the plan: at once at first, and ever later the more often it comes and goes."""
    joins = memory.joins.get(peer_id, Joins())
    wait = REJOIN_SECONDS[min(joins.count, len(REJOIN_SECONDS) - 1)]
    return now - joins.at >= wait


def _joined(memory: RunMemory, peer_id: str, now: float) -> Joins:
    joins = memory.joins.get(peer_id, Joins())
    lately = joins.count if now - joins.at < JOINS_FORGOTTEN_SECONDS else 0
    return Joins(lately + 1, now)


def _finishing(state: State, node: Node, now: float) -> bool:
    """A node that the operator drains is part of its last round, for a while, until it says that it is done."""
    live = state.live.get(node.peer_id)
    if live is None or live.lost or not node.draining or node.banned or node.left:
        return False
    in_time = live.drain_since is not None and now - live.drain_since < DRAIN_SECONDS
    return in_time and (not live.connected or live.status.state in FIT)


def _may_return(state: State, peer_id: str) -> bool:
    live = state.live.get(peer_id)
    if live is None or live.lost:
        return False
    return not live.connected or live.status.state in (mb.NODE_STATE_FINISHED, mb.NODE_STATE_UNSPECIFIED)


def _difference(state: State, before: tuple[str, ...], after: list[str]) -> str:
    came = [state.nodes[peer].name for peer in after if peer not in before]
    went = [f"{state.nodes[peer].name} {_why_gone(state, peer)}" for peer in before if peer not in after]
    return "; ".join([f"{name} joins" for name in came] + went)


def _why_gone(state: State, peer_id: str) -> str:
    node, live = state.nodes[peer_id], state.live.get(peer_id)
    for gone, word in ((node.banned, "was banned"), (node.left, "left"), (node.draining, "drains")):
        if gone:
            return word
    if live is None or live.lost:
        return "was lost"
    return f"is {enum_word(mb.NodeState.DESCRIPTOR, live.status.state).replace('_', ' ')}"


# --- shared ----------------------------------------------------------------------------------------


def _wanted(node: Node) -> bool:
    return "node" in node.roles and not (node.banned or node.left or node.draining)


def _fit(state: State, node: Node) -> bool:
    live = state.live.get(node.peer_id)
    return _wanted(node) and live is not None and live.connected and live.status.state in FIT


def _ordered(state: State, now: Moment, run_id: str, target: str, why: str) -> Step[Run]:
    run = find.run(state, run_id)
    draft = Draft(state, now)
    _move(draft, run.run_id, target, why)
    return draft.done(draft.state.runs[run.run_id])


def _move(draft: Draft, run_id: str, target: str, why: str) -> None:
    run = draft.state.runs[run_id]
    if target not in EDGES[run.state]:
        possible = ", ".join(sorted(EDGES[run.state])).lower() or "nothing"
        raise InvalidTransition(
            f"run {run_id!r} is {run.state.lower()}: it cannot become {target.lower()}",
            f"from here it can become: {possible}",
        )
    draft.put(replace(run, state=target))
    draft.event(f"run.{target.lower()}", run_id, run_id, why)
