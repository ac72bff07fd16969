"""The coordinator's state after a restart, from the rows of its database. Pure."""

from __future__ import annotations

import json
from dataclasses import replace

from atoll.coordinator.live import hand_over
from atoll.coordinator.state.kept_rounds import rounds_to_keep
from atoll.coordinator.state.run_memory import (
    Commit,
    RunMemory,
    add_base,
    attempt_key,
    commit_from_row,
    is_void,
    ranks_of,
    token_caps_of,
)
from atoll.coordinator.state.snapshot import LiveNode, State, StepTime
from atoll.coordinator.store.records import Checkpoint
from atoll.coordinator.store.store import Contents
from atoll.core.manifest import manifest_hash
from atoll.core.membership import EMPTY_DENY_LIST, DenyList
from atoll.core.plan import Base, Plan
from atoll.core.run_spec import parse_run_spec
from atoll.v1 import manifest_pb2


def restore(
    contents: Contents, plans: tuple[Plan, ...], deny: DenyList | None, now: StepTime, operator_key: bytes = b""
) -> State:
    """The state after a restart. `plans` and `deny` come from the database, with verified signatures.

    Members of the newest plans have the usual time to reconnect, as if their streams had just ended.
    """
    runs = {run.run_id: run for run in contents.runs}
    memory = {run_id: _rebuild_run_memory(run_id, contents, plans, now) for run_id in runs}
    nodes = {node.peer_id: node for node in contents.nodes}
    for source in {item.spec.fork.run for item in memory.values() if item.spec.fork is not None} & runs.keys():
        memory[source] = replace(memory[source], kept_rounds=rounds_to_keep(contents.runs, memory, source))
    live = {
        peer: LiveNode(session=0, last_message_at=now.monotonic, drain_since=now.monotonic)
        for item in memory.values()
        for peer in (item.plan.members if item.plan else ())
        if peer in nodes  # a run that has ended keeps its plan, whose members may be forgotten
    }
    state = State(
        operator_key=operator_key,
        tokens={token.token_id: token for token in contents.tokens},
        nodes=nodes,
        runs=runs,
        memory=memory,
        live=live,
        checkpoints=_checkpoints(contents.checkpoints),
        deleted_runs={trace.run_id: trace for trace in contents.deleted_runs},
        forgotten={trace.peer_id: trace for trace in contents.forgotten_nodes},
        deny=deny or EMPTY_DENY_LIST,
        deny_reserved=contents.deny.number if contents.deny else 0,
        last_event_id=contents.last_event_id,
        started_at=now.monotonic,
    )
    stages = [
        peer for peer in live if state.nodes[peer].draining and hand_over.must_hand_over(state, state.nodes[peer])
    ]
    return replace(state, live={**live, **{peer: replace(live[peer], handing_over=True) for peer in stages}})


def _rebuild_run_memory(run_id: str, contents: Contents, plans: tuple[Plan, ...], now: StepTime) -> RunMemory:
    run = next(item for item in contents.runs if item.run_id == run_id)
    own = sorted((plan for plan in plans if plan.run_id == run_id), key=lambda plan: plan.version)
    rounds = [row for row in contents.rounds if row.run_id == run_id]
    bases: tuple[Base, ...] = ()
    for plan in own:
        bases = add_base(bases, plan.base)
    void = {row.manifest_hash for row in rounds if row.committed and is_void(bases, row.number, row.made_under)}
    committed = {base.round: Commit(base.manifest_hash, committed_tokens=None) for base in bases[-1:]}
    for row in sorted(rounds, key=lambda row: row.number):
        if row.committed and row.manifest_hash not in void:
            committed[row.number] = commit_from_row(row, committed.get(row.number - 1))
    if run.genesis:
        committed[0] = Commit(_genesis_hash(run.genesis))
    credits = {row.peer_id: row for row in contents.credits if row.run_id == run_id}
    figures = next((row for row in reversed(contents.plan_figures) if row.run_id == run_id), None)
    return RunMemory(
        spec=parse_run_spec(run.spec_toml, f"the stored spec of run {run_id!r}"),
        plan=own[-1] if own else None,
        token_caps={plan.version: token_caps_of(plan) for plan in own},
        cut_counts={plan.version: len(plan.cuts) for plan in own},
        on_probation={plan.version: plan.on_probation for plan in own},
        abandoned_attempts=frozenset(attempt_key(row) for row in rounds if not row.committed),
        head_known_since=now.monotonic,
        committed=committed,
        votes={vote.number: vote for vote in contents.votes if vote.run_id == run_id},
        bases=bases,
        void_manifest_hashes=frozenset(void),
        figures=figures,
        left_out=json.loads(figures.left_out) if figures else {},
        credits=credits,
        credit_ranks=ranks_of(credits),
    )


def _checkpoints(rows: tuple[Checkpoint, ...]) -> dict[str, tuple[Checkpoint, ...]]:
    held: dict[str, tuple[Checkpoint, ...]] = {}
    for row in sorted(rows, key=lambda row: -row.round):
        held[row.peer_id] = (*held.get(row.peer_id, ()), row)
    return held


def _genesis_hash(genesis: bytes) -> bytes:
    return manifest_hash(manifest_pb2.CommittedManifest.FromString(genesis).payload)
