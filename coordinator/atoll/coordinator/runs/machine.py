"""State machine of heartbeat streams and timers: from messages and time to the next state and rows. Pure.

Enrolment is in `admission`, the operator's orders are in `lifecycle`, and what nodes report is in `rounds/reports`.
`tick_streams` and `tick_run` run a few times a second. They end silent streams, mark lost nodes, and advance runs. With
nothing to do they return the state that they were given.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from atoll.coordinator.live import hand_over, plan_pace, planner_answer
from atoll.coordinator.live.attendance import ELIGIBLE_STATES, corpus_expected
from atoll.coordinator.planner.question import Answer, Question, has_planner_inputs, memory_figures
from atoll.coordinator.rounds import genesis, learner, node_metrics, reports, training_scores
from atoll.coordinator.rounds.round_checks import check_layer_table, layer_count
from atoll.coordinator.rounds.zero_digests import ZeroDigests
from atoll.coordinator.runs import (
    assignment,
    bans,
    checkpoint_orders,
    checkpoints,
    forgetting,
    fork_source,
    forks,
    lifecycle,
    recovery,
)
from atoll.coordinator.sanitize import MAX_SENTENCE_CHARACTERS, clean, sanitized_message
from atoll.coordinator.state import availability, lookup, peer_paths
from atoll.coordinator.state.draft import Draft, Step, charge_row
from atoll.coordinator.state.rate_limits import MEMORY_CHANGES_RATE
from atoll.coordinator.state.snapshot import LiveNode, Policy, State, StepTime
from atoll.coordinator.store.records import SHA256_BYTES, Node
from atoll.core.errors import CorpusDiffers, InvalidRequest, InvalidTransition
from atoll.v1 import membership_pb2 as mb

MAX_MULTIADDRS = 64  # of one node; later ones are ignored
MAX_MULTIADDR_CHARACTERS = 256
MAX_INSTANCE_BYTES = 32
MAX_REPORTS = 256  # of each kind in one heartbeat
_CORPUS_DIGEST = re.compile(r"(?:[0-9a-f]{64})?")


def connect(state: State, now: StepTime, peer_id: str, instance: bytes = b"", authority: str = "") -> Step[int]:
    """Open a heartbeat stream, and return its session number. This ends an older stream of the peer.

    `instance` names the process at its other end; `authority` issued the certificate that it shows.

    Raises `Banned`, `CertificateInvalid`.
    """
    node = lookup.member(state, peer_id)
    draft = Draft(state, now)
    session = draft.new_session()
    old = state.live.get(peer_id)
    drain_since = old.drain_since if old else now.monotonic
    fresh = LiveNode(
        session=session,
        last_message_at=now.monotonic,
        connected_at=now.monotonic,
        instance=instance,
        drain_since=drain_since,
    )
    if old is not None:  # a reconnect does not refill the rate limits
        fresh = replace(
            fresh,
            handing_over=old.handing_over,
            unfit_since=old.unfit_since,
            unfit_round=old.unfit_round,
            profile=old.profile,  # kept until a new report, so that a short break causes no new plan
            promised=old.promised,
            promised_before=old.promised_before if old.instance == instance else old.promised,
            row_allowance=old.row_allowance,
            refusal_allowance=old.refusal_allowance,
            metrics_allowance=old.metrics_allowance,
            pending_metrics=old.pending_metrics,
            memory_change_allowance=old.memory_change_allowance,
            dropped_reports=old.dropped_reports,
            dropped_since=old.dropped_since,
        )
    draft.set_live(peer_id, fresh)
    node = replace(availability.count_absence(node, old, now.monotonic), authority=authority)
    draft.put(replace(node, left=False, ended="", ended_detail="", last_seen_ms=now.unix_ms))
    if charge_row(draft, peer_id):  # repeated reconnects do not fill the event log
        draft.event("node.connected", node.run_id, peer_id, f"{node.name} connected")
    return draft.done(session)


def heartbeat(state: State, now: StepTime, peer_id: str, session: int, request: mb.HeartbeatRequest) -> Step[None]:
    """Apply one message of a stream, except its genesis (`take_genesis`).

    Raises `InvalidTransition` if the stream is no longer the node's, `CorpusDiffers` if the node's corpus is not the
    run's, and `InvalidRequest`.
    """
    node, live = check_session(state, peer_id, session)
    _check_request(request)
    count = layer_count(state.runs[node.run_id].layers)
    if len(request.status.lost_layers) > count:
        raise InvalidRequest(f"lost_layers has {len(request.status.lost_layers)} entries; the model has {count} layers")
    draft = Draft(state, now)
    status = sanitized_message(request.status, MAX_SENTENCE_CHARACTERS)
    status.data_stall_share = min(1.0, status.data_stall_share)
    if request.HasField("deny_list"):
        bans.merge_deny_list(draft, request.deny_list)
    _take_addresses(draft, node, request)
    live = replace(
        live,
        last_message_at=now.monotonic,
        stays_in_run=live.stays_in_run or request.stays_in_run,
        challenge_answered=live.challenge_answered or request.challenge_answer == live.challenge != b"",
        promised=request.promised.SerializeToString() if request.HasField("promised") else live.promised,
        status=status,
        unfit_since=_unfit_since(live, status.state, now.monotonic),
        unfit_round=live.unfit_round if live.unfit_since is not None else state.runs[node.run_id].head_round,
        **_accepted_profile(live, request, now.monotonic),
        paths=peer_paths.merge_reported_paths(live.paths, request.paths, state.nodes, now.monotonic)
        if request.paths
        else live.paths,
        corpus_digest=request.corpus_digest or live.corpus_digest,
        layers=_accepted_layer_table(state, node, live, request),
    )
    if "node" in node.roles:  # a seed cannot write a genesis
        live = fork_source.take_former_checkpoints(live, state, node, request)
    draft.set_live(peer_id, live)
    if live.stays_in_run:
        assignment.keep_where_it_is(draft, peer_id)
    if "node" in node.roles:
        checkpoints.update_from_heartbeat(draft, node, request)
        _take_reports(draft, node, request)
    return draft.done(None)


def take_genesis(
    state: State, now: StepTime, peer_id: str, session: int, report: mb.GenesisReport, zeros: ZeroDigests
) -> Step[None]:
    """Apply the genesis in a message. `zeros`: digests for its layers. Raises the errors of `check_session`."""
    node, _ = check_session(state, peer_id, session)
    draft = Draft(state, now)
    if "node" in node.roles:
        genesis.apply_genesis_report(draft, peer_id, node.run_id, report, zeros)
    return draft.done(None)


def check_session(state: State, peer_id: str, session: int) -> tuple[Node, LiveNode]:
    """The node's row and live state, if its stream is still valid.

    Raises `Banned`, `InvalidTransition`, `CorpusDiffers`.
    """
    node, live = lookup.member(state, peer_id), state.live.get(peer_id)
    expected = corpus_expected(state, node.run_id)
    if expected and live and live.corpus_digest not in ("", expected):
        raise CorpusDiffers(
            f"the corpus of this node ({live.corpus_digest[:12]}…) is not the run's ({expected[:12]}…)",
            "use the same text as the other nodes: `atoll up --data PATH`",
        )
    if live is None or live.session != session:
        raise InvalidTransition(
            "heartbeat stream closed: it timed out, or a newer stream of this node replaced it", "reconnect"
        )
    return node, live


def disconnect(state: State, now: StepTime, peer_id: str, session: int) -> Step[None]:
    """Record the end of a stream. Does nothing if the node has a newer stream."""
    draft = Draft(state, now)
    live = state.live.get(peer_id)
    if live is not None and live.session == session:
        _end_stream(draft, peer_id, live)
    return draft.done(None)


def tick_streams(state: State, now: StepTime, policy: Policy) -> Step[None]:
    """End silent streams, mark lost nodes, and delete old traces of forgotten nodes."""
    draft = Draft(state, now)
    forgetting.drop_old_traces(draft)
    reports.log_dropped_reports(draft)
    for peer_id, live in draft.state.live.items():
        if live.connected and now.monotonic - live.last_message_at > policy.silence_seconds:
            _end_stream(draft, peer_id, live)
        elif (
            not live.connected
            and not live.counted_as_lost
            and now.monotonic - live.last_message_at > policy.lost_after_seconds
        ):
            _mark_lost(draft, peer_id, live)
    return draft.done(None)


def tick_run(state: State, now: StepTime, policy: Policy, run_id: str) -> Step[None]:
    """Apply the effects of time in one run. Each run has its own step, so that no run delays another."""
    draft = Draft(state, now)
    if run_id not in state.runs:
        return draft.done(None)  # the run was deleted since this tick began
    _end_streams_with_other_corpus(draft, run_id)
    learner.ask_for_missing_rounds(draft, run_id)
    forks.look_for_forks(draft, run_id)
    hand_over.release_drained(draft, run_id, policy)
    lifecycle.advance(draft, run_id, policy)
    checkpoint_orders.keep_up(draft, run_id)
    if draft.state.runs[run_id].state == "TRAINING":
        recovery.recover_if_lost(draft, run_id, policy)
        plan_pace.sample_pace(draft, run_id)
        plan_pace.ask_prediction(draft, run_id, policy)
    return draft.done(None)


def apply_planner_answer(state: State, now: StepTime, run_id: str, question: Question, answer: Answer) -> Step[Any]:
    """Apply the planner's answer to a run's question."""
    if run_id not in state.runs:
        return Draft(state, now).done(None)  # the run was deleted meanwhile
    if question.given_routes:
        return plan_pace.take_prediction(state, now, run_id, question, answer)
    return planner_answer.accept_answer(state, now, run_id, question, answer)


def _check_request(request: mb.HeartbeatRequest) -> None:
    if not _CORPUS_DIGEST.fullmatch(request.corpus_digest):
        raise InvalidRequest("corpus_digest must be empty or 64 hexadecimal digits")
    if len(request.status.head_hash) not in (0, SHA256_BYTES):
        raise InvalidRequest(f"head_hash has {len(request.status.head_hash)} bytes; must be 0 or {SHA256_BYTES}")
    reported = request.rounds, request.evaluations, request.training_audits, request.metrics
    if any(len(items) > MAX_REPORTS for items in reported):
        raise InvalidRequest(f"a heartbeat may have at most {MAX_REPORTS} rounds, evaluations, audits and metrics each")
    if len(request.checkpoints) > checkpoints.MAX_REPORTED_CHECKPOINTS:
        raise InvalidRequest(f"a heartbeat may report at most {checkpoints.MAX_REPORTED_CHECKPOINTS} checkpoints")
    if len(request.instance) > MAX_INSTANCE_BYTES or len(request.challenge_answer) > MAX_INSTANCE_BYTES:
        raise InvalidRequest(f"instance and challenge_answer may have at most {MAX_INSTANCE_BYTES} bytes")
    if not all(map(_is_multiaddr, request.multiaddrs[:MAX_MULTIADDRS])):
        raise InvalidRequest(
            f"a multiaddr must start with /, without spaces, with at most {MAX_MULTIADDR_CHARACTERS} characters"
        )


def _is_multiaddr(text: str) -> bool:
    printable = text.split() == [text] and clean(text) == text
    return 0 < len(text) <= MAX_MULTIADDR_CHARACTERS and text.startswith("/") and printable


def _unfit_since(live: LiveNode, state: mb.NodeState, now: float) -> float | None:
    """When the node became ineligible; None while it is eligible. New messages and streams do not reset the time."""
    if state in ELIGIBLE_STATES:
        return None
    return now if live.unfit_since is None else live.unfit_since


def _accepted_profile(live: LiveNode, request: mb.HeartbeatRequest, now: float) -> dict[str, Any]:
    """Changed fields of `LiveNode` for a reported profile.

    A profile is ignored while the node changes its planner inputs more often than `MEMORY_CHANGES_RATE` allows.
    """
    if not request.HasField("profile"):
        return {}
    profile = peer_paths.sanitized_profile(request.profile)
    if (memory_figures(profile), has_planner_inputs(profile)) == (
        memory_figures(live.profile),
        has_planner_inputs(live.profile),
    ):
        return {"profile": profile}
    remaining = live.memory_change_allowance.spend(MEMORY_CHANGES_RATE, now)
    return {} if remaining is None else {"profile": profile, "memory_change_allowance": remaining}


def _accepted_layer_table(state: State, node: Node, live: LiveNode, request: mb.HeartbeatRequest) -> bytes:
    """The node's layer table, which is used until genesis sets the run's table. Raises `PeerMisbehaved`."""
    if state.runs[node.run_id].genesis or not request.HasField("layers"):
        return b"" if state.runs[node.run_id].genesis else live.layers
    check_layer_table(request.layers, state.memory[node.run_id].spec.model_hash())
    return request.layers.SerializeToString(deterministic=True)


def _take_addresses(draft: Draft, node: Node, request: mb.HeartbeatRequest) -> None:
    addresses = tuple(request.multiaddrs[:MAX_MULTIADDRS])
    if addresses and addresses != node.multiaddrs:
        draft.put(replace(draft.state.nodes[node.peer_id], multiaddrs=addresses))


def _take_reports(draft: Draft, node: Node, request: mb.HeartbeatRequest) -> None:
    for item in request.rounds:
        reports.apply_round_report(draft, node.peer_id, node.run_id, item)
    for evaluation in request.evaluations:
        reports.apply_evaluation_report(draft, node.peer_id, node.run_id, evaluation)
    for audit in request.training_audits:
        training_scores.apply_training_audit(draft, node.peer_id, node.run_id, audit)
    for metrics in request.metrics:
        node_metrics.take_metrics(draft, node.peer_id, node.run_id, metrics)
    if request.HasField("manifests"):
        learner.take_answer(draft, node.peer_id, node.run_id, request.manifests)
        forks.take_answer(draft, node.peer_id, node.run_id, request.manifests)


def _end_stream(draft: Draft, peer_id: str, live: LiveNode) -> None:
    draft.set_live(peer_id, replace(live, session=0, last_message_at=draft.now.monotonic))
    node = availability.count_connected(draft.state.nodes[peer_id], live, draft.now.monotonic)
    draft.put(replace(node, last_seen_ms=draft.now.unix_ms))


def _mark_lost(draft: Draft, peer_id: str, live: LiveNode) -> None:
    draft.set_live(peer_id, replace(live, counted_as_lost=True))
    node = draft.state.nodes[peer_id]
    if not (node.left or node.banned):
        draft.put(availability.count_loss(node, live))
        draft.event("node.lost", node.run_id, peer_id, f"{node.name} was lost: no heartbeat stream")


def _end_streams_with_other_corpus(draft: Draft, run_id: str) -> None:
    """Log nodes with another corpus, once per stream; `check_session` then ends their streams."""
    expected = corpus_expected(draft.state, run_id)
    if not expected:
        return
    for node in draft.state.members_of(run_id):
        live = draft.state.live.get(node.peer_id)
        if live and live.connected and live.corpus_digest not in ("", expected):
            if charge_row(draft, node.peer_id):
                message = f"{node.name} holds different training data than the run"
                draft.event("node.corpus-differs", run_id, node.peer_id, message)
            _end_stream(draft, node.peer_id, live)
