"""Rows and live figures as messages of `admin.proto` and `membership.proto`. Pure.

Nodes' figures were made finite when they arrived, so every front end may print them as JSON.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from atoll.coordinator.live.attendance import ready_count, uncounted
from atoll.coordinator.rounds import run_pace
from atoll.coordinator.rounds.coordinator_seat import VoteReply
from atoll.coordinator.rounds.credits import FORGOTTEN
from atoll.coordinator.rounds.source_losses import from_text
from atoll.coordinator.runs import checkpoints
from atoll.coordinator.runs.checkpoint_orders import Progress
from atoll.coordinator.runs.fork_source import ForkSource
from atoll.coordinator.services.plan_views import plan_fields
from atoll.coordinator.state import lookup
from atoll.coordinator.state.availability import availability, failures_per_hour
from atoll.coordinator.state.peer_paths import recent_paths
from atoll.coordinator.state.run_memory import is_void
from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import (
    Checkpoint,
    Evaluation,
    Event,
    Node,
    NodeMetrics,
    ProofRow,
    Round,
    Run,
    Token,
)
from atoll.core.membership import ROLES
from atoll.core.node_reasons import named_reason
from atoll.core.round_id import RoundId
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import plan_pb2

MAX_SOURCE_POINTS = 400  # evaluations with losses by source in one view, evenly picked; a source takes about 45 bytes


def token_view(token: Token) -> admin.TokenView:
    """View of a token without its secret."""
    return admin.TokenView(
        id=token.token_id,
        run_id=token.run_id,
        roles=[ROLES[role] for role in token.roles],
        uses_left=token.uses_left,
        uses_total=token.uses_total,
        created_unix_ms=token.created_ms,
        expires_unix_ms=token.expires_ms,
        revoked=token.revoked,
        on_probation=token.on_probation,
    )


def node_view(state: State, node: Node, unix_ms: int, monotonic: float) -> admin.NodeView:
    """View of a node as of its last heartbeat."""
    live = state.live.get(node.peer_id)
    last_seen_ms = node.last_seen_ms
    if live is not None and live.connected:
        last_seen_ms = max(last_seen_ms, unix_ms - int((monotonic - live.last_message_at) * 1000))
    view = admin.NodeView(
        peer_id=node.peer_id,
        name=node.name,
        run_id=node.run_id,
        roles=[ROLES[role] for role in node.roles],
        profile=live.profile if live else None,
        status=live.status if live else None,
        enrolled_unix_ms=node.enrolled_ms,
        last_seen_unix_ms=last_seen_ms,
        connected=live is not None and live.connected,
        banned=node.banned,
        draining=node.draining,
        assigned_run=node.assigned_run,
        on_probation=node.on_probation,
        left=node.left,
        ended=named_reason(node.ended),
        ended_detail=node.ended_detail,
        multiaddrs=node.multiaddrs,
        availability=availability(node, live, monotonic),
        failures_per_hour=failures_per_hour(node, live, monotonic),
        paths=[
            mb.PeerPath(peer_id=peer, rtt_seconds=path.rtt_seconds, bytes_per_second=path.bytes_per_second)
            for peer, path in sorted(recent_paths(live.paths, monotonic).items() if live else ())
        ],
    )
    view.MergeFrom(plan_fields(state, node))
    compared = state.memory[node.run_id].training_compared.get(node.peer_id)
    if compared is not None:
        view.training_audits, view.training_score = compared.audits, compared.score
        view.typical_training_score, view.training_doubted = compared.typical, compared.doubted
    return view


def run_view(state: State, run: Run, unix_ms: int, evaluations: tuple[Evaluation, ...] = ()) -> admin.RunView:
    """View of a run; `evaluations` are read from the store because they are many."""
    eta = run_pace.eta_of(state, run, unix_ms)
    memory, every = state.memory[run.run_id], max(1, -(-len(evaluations) // MAX_SOURCE_POINTS))
    return admin.RunView(
        run_id=run.run_id,
        state=run_state(run),
        spec_toml=run.spec_toml,
        head_round=run.head_round,
        committed_tokens=run.committed_tokens,
        stop_tokens=memory.spec.run.stop_tokens,
        rounds_opened=run.rounds_opened,
        rounds_committed=run.head_round,  # including rounds that were never reported
        plan_version=run.plan_version,
        validation_loss=run.loss,
        nodes_ready=ready_count(state, run.run_id),
        min_nodes=memory.spec.run.min_nodes,
        layers=plan_pb2.LayerTable.FromString(run.layers) if run.layers else None,
        evaluations=[
            mb.EvaluationReport(
                round=item.round,
                loss=item.loss,
                committed_tokens=item.committed_tokens,
                sources=from_text(item.sources) if (len(evaluations) - index) % every == 0 else (),
            )
            for index, item in enumerate(evaluations, 1)
        ],
        missing=memory.no_plan_reason or memory.undecidable_reason,
        uncounted=uncounted(state, run.run_id),
        eta_unix_ms=eta.unix_ms if eta else None,
        recent_tokens_per_second=eta.tokens_per_second if eta else None,
    )


def round_view(state: State, row: Round) -> admin.RoundView:
    """View of one row of the round log."""
    return admin.RoundView(
        round=RoundId(row.run_id, row.plan_version, row.fragment, row.number, row.attempt).to_proto(),
        committed=row.committed,
        reason=row.reason,
        tokens=row.tokens,
        members=row.members,
        seconds=row.seconds,
        unix_ms=row.reported_ms,
        parts_zeroed=row.parts_zeroed,
        opener=row.opener,
        present=len(row.present),
        partial=row.partial,
        screened=row.screened,
        codec=row.codec,
        void=row.committed and is_void(state.memory[row.run_id].bases, row.number, row.made_under),
    )


def metrics_row(state: State, row: NodeMetrics) -> admin.MetricsRow:
    """View of one node's metrics of one round."""
    node = state.nodes.get(row.peer_id)
    return admin.MetricsRow(
        peer_id=row.peer_id,
        name=lookup.newest(state, node).name if node is not None else "",
        unix_ms=row.reported_ms,
        metrics=_measured(row),
    )


def _measured(row: NodeMetrics) -> mb.NodeMetrics:
    return mb.NodeMetrics(
        round=row.round,
        train_loss=row.train_loss,
        learning_rate=row.learning_rate,
        tokens=row.tokens,
        seconds=row.seconds,
        update_norm=row.update_norm,
        compute_seconds=row.compute_seconds,
        stall_seconds=row.stall_seconds,
        exchange_seconds=row.exchange_seconds,
        bytes_sent=row.bytes_sent,
        bytes_received=row.bytes_received,
    )


def vote_answer(round_id: RoundId, given: VoteReply) -> mb.VoteResponse:
    """The coordinator's promise and earlier vote as a message. The caller signs the vote."""
    response = mb.VoteResponse(granted=given.granted, reason=given.reason)
    if given.vote is not None:
        response.promised_plan_version = given.vote.promised_plan
        response.promised_attempt = given.vote.promised_attempt
        if given.vote.proposal:
            voted = replace(round_id, plan_version=given.vote.voted_plan, attempt=given.vote.voted_attempt)
            response.accepted_ballot.CopyFrom(voted.to_proto())
            response.accepted_proposal = given.vote.proposal
    return response


def proof_view(state: State, row: ProofRow) -> admin.ProofView:
    """A proof against a member, without its bytes."""
    known = lookup.known(state, row.culprit)
    return admin.ProofView(
        id=row.proof_id,
        run_id=row.run_id,
        culprit=row.culprit,
        culprit_name=known.name if known else "",
        kind=row.kind,
        round=row.round,
        found_unix_ms=row.found_ms,
        banned=not state.deny.peer_ids.isdisjoint({row.culprit, *([known.peer_id] if known else [])}),
        sentence=row.sentence,
    )


def checkpoint_view(state: State, item: Checkpoint) -> admin.CheckpointView:
    """View of a checkpoint and its holder."""
    return admin.CheckpointView(
        checkpoint=mb.CheckpointInfo(
            round=item.round,
            manifest_hash=item.manifest_hash,
            bytes=item.size_bytes,
            written_unix_ms=item.written_ms,
            committed_tokens=item.committed_tokens,
            layers=plan_pb2.Span(first=item.first_layer, last=item.last_layer),
        ),
        peer_id=item.peer_id,
        node_name=state.nodes[item.peer_id].name,
        connected=checkpoints.connected(state, item.peer_id),
        committed=checkpoints.is_committed(state, item),
    )


def checkpoint_progress(state: State, found: Progress) -> admin.OrderCheckpointResponse:
    """View of the progress of a checkpoint order."""
    return admin.OrderCheckpointResponse(
        run_id=found.run_id,
        round=found.wanted,
        written_round=found.written_round,
        checkpoints=[checkpoint_view(state, item) for item in found.held],
        waiting=found.waiting,
        missing=found.missing,
    )


def credit_views(state: State, run_id: str, limit: int) -> list[admin.CreditView]:
    """Views of what nodes contributed to a run: `limit` nodes, the most tokens first; then all forgotten ones."""
    memory = state.memory[run_id]
    ordered = sorted((item for peer, item in memory.credits.items() if peer), key=lambda it: (-it.tokens, it.peer_id))
    forgotten = [memory.credits[FORGOTTEN]] if FORGOTTEN in memory.credits else []
    return [
        admin.CreditView(
            peer_id=item.peer_id,
            name=state.nodes[item.peer_id].name if item.peer_id in state.nodes else "",
            rank=memory.credit_ranks.get(item.peer_id, 0),
            tokens=item.tokens,
            rounds=item.rounds,
            first_unix_ms=item.first_ms,
            last_unix_ms=item.last_ms,
        )
        for item in [*ordered[:limit], *forgotten]
    ]


def event_view(row: Event) -> admin.Event:
    """View of one row of the event log."""
    return admin.Event(
        id=row.event_id,
        unix_ms=row.unix_ms,
        kind=row.kind,
        run_id=row.run_id,
        subject=row.subject,
        message=row.message,
    )


def fork_source_view(state: State, source: ForkSource) -> admin.ForkSourceView:
    """View of a round with which a fork can begin."""
    return admin.ForkSourceView(
        run_id=source.run.run_id,
        round=source.round,
        manifest_hash=source.manifest_hash,
        committed=source.committed,
        holders=[_fork_holder(state, item.peer_id) for item in source.held],
        spec_toml=source.run.spec_toml,
    )


def _fork_holder(state: State, peer_id: str) -> admin.ForkHolder:
    node, connected = state.nodes[peer_id], checkpoints.connected(state, peer_id)
    return admin.ForkHolder(peer_id=peer_id, node_name=node.name, run_id=node.run_id, connected=connected)


def run_state(run: Run) -> mb.RunState:
    """A run's state as a protobuf enum."""
    return cast("mb.RunState", mb.RunState.Value(f"RUN_STATE_{run.state}"))


def order_for(state: State, node: Node) -> mb.Order:
    """The order that a node should follow now."""
    live = state.live.get(node.peer_id)
    if node.draining and not (live is not None and live.handing_over):
        return mb.ORDER_MOVE if node.assigned_run else mb.ORDER_DRAIN
    memory, run = state.memory[node.run_id], state.runs[node.run_id]
    if (
        run.state == "GENESIS"
        and not run.genesis
        and memory.genesis_writer == node.peer_id
        and node.peer_id not in memory.failed_genesis_writers
    ):
        return mb.ORDER_WRITE_GENESIS
    return mb.ORDER_UNSPECIFIED
