"""Forks: two results of one round, each with the votes of a majority of the seats. Pure.

Honest seats cannot cause a fork (docs/explain/rounds.md), so a seat broke the rules of voting. The coordinator detects
it when a connected node's head contradicts the log. It asks that node for its last rounds, finds the first that
differs, and checks its votes. Then two things happen without the operator:

- A member that voted for both results in one ballot is banned at once, with a proof (`core/proofs.py`). A fork of two
  ballots has no double vote, and nobody is banned for it.
- The run continues from the newest round of the log, as after a recovery. So all rounds built on the other result are
  void. Rounds that members commit before they receive the recovery become void too, and nobody keeps the state of
  earlier rounds. So the coordinator waits until no commit is near: the members on the log's side cannot decide without
  the others, or have just committed, or have not committed for long. In the first two minutes, it also waits while one
  of them is ahead of the log.

The operator may take a ban back (`atollctl node unban`).
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from atoll.coordinator.live.attendance import eligible_nodes
from atoll.coordinator.rounds.reports import reject
from atoll.coordinator.rounds.round_checks import check_size
from atoll.coordinator.runs import bans, recovery
from atoll.coordinator.state import lookup
from atoll.coordinator.state.draft import Draft, charge_refusal
from atoll.coordinator.state.run_memory import Fork, ForkInquiry, RunMemory, electorate_after, epoch_of
from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import MAX_INTEGER, SHA256_BYTES, ProofRow, Run
from atoll.core.errors import AtollError, PeerMisbehaved
from atoll.core.identity import peer_id_of
from atoll.core.manifest import Head, parse_head, require_quorum, strip_unknown_manifest_fields, verify_votes
from atoll.core.proofs import double_votes, proof_id, verify_proof
from atoll.core.quorum import COORDINATOR, MAX_SEATS
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

BATCH = 32  # rounds in one answer
ANSWER_SECONDS = 10.0  # for a node to answer
SEARCH_SECONDS = 60.0  # for all answers of one node about one head
ASK_AGAIN_SECONDS = 60.0  # before the same node is asked again
JUST_COMMITTED_SECONDS = 2.0
AHEAD_SECONDS = 120.0  # for the log to follow a node that reports a newer head


def look_for_forks(draft: Draft, run_id: str) -> None:
    """Ask a node whose head contradicts the log for the rounds up to that head. End a fork that was found."""
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    if memory.fork is not None:
        _end_fork(draft, run_id, memory.fork)
    elif memory.fork_inquiry is None or now - memory.fork_inquiry.since >= ANSWER_SECONDS:
        _ask_next(draft, run_id)


def take_answer(draft: Draft, peer_id: str, run_id: str, answer: mb.ManifestAnswer) -> None:
    """Find the first round in a node's answer that differs from the log, if the node was asked."""
    inquiry = draft.state.memory[run_id].fork_inquiry
    if inquiry is None or (inquiry.peer_id, inquiry.first) != (peer_id, answer.first):
        return
    draft.remember(run_id, fork_inquiry=None)
    try:
        other = _first_difference(draft, run_id, inquiry, answer)
        if other is not None and _is_second_result(draft, run_id, inquiry, other):
            _found(draft, run_id, peer_id, other)
    except AtollError as error:
        reject(draft, run_id, peer_id, "round", error)


# --- who is asked ------------------------------------------------------------------------------------


def _ask_next(draft: Draft, run_id: str) -> None:
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    found = _contradicting_heads(draft.state, run_id)
    asked = {peer: at for peer, at in memory.contradictions.items() if now - at < ASK_AGAIN_SECONDS}
    due = found.keys() - asked.keys()
    if due:
        peer = min(due, key=lambda peer: hashlib.sha256(f"{now}/{peer}".encode()).digest())  # in a pseudo-random order
        asked[peer] = now
        last = min(found[peer], draft.state.runs[run_id].head_round)
        _ask(draft, run_id, ForkInquiry(peer, last - BATCH + 1, last, now, now))
    elif memory.fork_inquiry is not None:
        draft.remember(run_id, fork_inquiry=None)
    if asked != memory.contradictions:
        draft.remember(run_id, contradictions=asked)


def _ask(draft: Draft, run_id: str, inquiry: ForkInquiry) -> None:
    """Ask, unless the search has already taken too long."""
    now = draft.now.monotonic
    if now - inquiry.began < SEARCH_SECONDS:
        first = max(_base_round(draft.state.memory[run_id]) + 1, inquiry.first)
        draft.remember(run_id, fork_inquiry=replace(inquiry, first=first, since=now))


def _base_round(memory: RunMemory) -> int:
    """The round of the newest base. A fork before it is void, so it is not searched."""
    return memory.bases[-1].round if memory.bases else 0


def _contradicting_heads(state: State, run_id: str) -> dict[str, int]:
    """Rounds of connected nodes whose heads are not in the log, by peer id."""
    run, memory = state.runs[run_id], state.memory[run_id]
    if run.state != "TRAINING":
        return {}
    trainers = [node.peer_id for node in state.members_of(run_id) if "node" in node.roles]
    here = {peer: live for peer in trainers if (live := state.live.get(peer)) is not None and live.connected}
    return {peer: live.status.head_round for peer, live in here.items() if _contradicts(run, memory, peer, live.status)}


def _contradicts(run: Run, memory: RunMemory, peer_id: str, status: mb.NodeStatus) -> bool:
    """Whether the node's head differs from the log, or is ahead of it and cannot be learned.

    False while it is asked.
    """
    number, digest, inquiry = status.head_round, status.head_hash, memory.inquiry
    if len(digest) != SHA256_BYTES or digest in memory.void_manifest_hashes:
        return False
    if not _base_round(memory) < number <= MAX_INTEGER:
        return False
    known = memory.committed.get(number)
    differs = known is not None and known.manifest_hash != digest
    ahead_in_vain = number > run.head_round and inquiry is not None and peer_id in inquiry.failed
    asked_now = inquiry is not None and inquiry.peer_id == peer_id  # it answers one question at a time
    return (differs or ahead_in_vain) and not asked_now


# --- what it answers ---------------------------------------------------------------------------------


def _first_difference(draft: Draft, run_id: str, inquiry: ForkInquiry, answer: mb.ManifestAnswer) -> Head | None:
    """The first round of the answer that differs from the log. Verifies no signature. Raises `AtollError`."""
    if not charge_refusal(draft, inquiry.peer_id):
        raise PeerMisbehaved("this node has no allowance left for rejected reports")
    number, memory = inquiry.first, draft.state.memory[run_id]
    for committed in answer.manifests[:BATCH]:
        check_size(committed)
        head = parse_head(committed, run_id, max_signatures=MAX_SEATS)
        if head.round != number:
            raise PeerMisbehaved(f"it sent round {head.round} instead of round {number}")
        known = memory.committed.get(number)
        if known is not None and known.manifest_hash != head.hash:
            return Head(strip_unknown_manifest_fields(committed))
        number += 1
    if inquiry.first < number <= inquiry.last:  # the other rounds did not fit into the answer
        _ask(draft, run_id, replace(inquiry, first=number))
    return None


def _is_second_result(draft: Draft, run_id: str, inquiry: ForkInquiry, other: Head) -> bool:
    """Whether this round follows the log and has the votes of a majority. Raises `SignatureInvalid`."""
    memory, number = draft.state.memory[run_id], other.round
    before = memory.committed.get(number - 1)
    if before is None or other.manifest.previous_hash != before.manifest_hash:
        if number == inquiry.first > _base_round(memory) + 1:  # the histories differ before these rounds
            _ask(draft, run_id, replace(inquiry, first=number - BATCH, last=number - 1))
        return False
    electorate = electorate_after(memory, number - 1)
    if electorate is None or other.manifest.epoch != epoch_of(memory.bases, number):
        return False
    require_quorum(other, electorate, draft.state.operator_key)
    verify_votes(other)
    return True


# --- what follows ------------------------------------------------------------------------------------


def _found(draft: Draft, run_id: str, peer_id: str, other: Head) -> None:
    """Ban the nodes that proofs name, and record the fork. `_end_fork` lets the run continue from the log."""
    memory, number = draft.state.memory[run_id], other.round
    mine = memory.recent_manifests.get(number)
    proofs = double_votes(Head(manifest_pb2.CommittedManifest.FromString(mine)), other) if mine else ()
    culprits = [_convict(draft, run_id, proof) for proof in proofs]
    proved = f"proofs name {', '.join(culprits)}" if culprits else "no double vote proves who caused it"
    known, name = memory.committed[number].manifest_hash.hex()[:12], draft.state.nodes[peer_id].name
    two = f"{known}… in the log and {other.hash.hex()[:12]}… on {name}"
    draft.event("run.forked", run_id, str(number), f"round {number} has two results, {two}; {proved}")
    draft.remember(run_id, fork=Fork(number, draft.now.monotonic))


def _convict(draft: Draft, run_id: str, proof: bytes) -> str:
    """Keep a proof, and ban the node that it names. Returns the node's name."""
    breach, name = verify_proof(proof), proof_id(proof)
    if breach.culprit == peer_id_of(draft.state.operator_key):
        return "the coordinator's own key"
    known = lookup.known(draft.state, breach.culprit)
    if known is None:
        return breach.culprit
    now_ms = draft.now.unix_ms
    draft.log(ProofRow(run_id, breach.culprit, name, breach.kind, breach.round, now_ms, breach.sentence, proof))
    draft.event(
        "trust.proved", run_id, breach.culprit, f"{known.name} broke the rules: {breach.sentence}; proof {name}"
    )
    bans.ban_known(draft, known, f"proof {name}: {breach.kind}")
    return known.name


def _end_fork(draft: Draft, run_id: str, fork: Fork) -> None:
    """Continue from the newest round of the log, if its holders will still have it when they receive the new plan."""
    run, memory = draft.state.runs[run_id], draft.state.memory[run_id]
    if fork.round > run.head_round or _base_round(memory) >= fork.round:  # a recovery ended the fork
        draft.remember(run_id, fork=None)
        return
    head = memory.committed[run.head_round].manifest_hash
    found, statuses = set(_contradicting_heads(draft.state, run_id)), draft.state.live
    side = [peer for peer in eligible_nodes(draft.state, run_id) if peer not in found]
    holders = [
        peer
        for peer in side
        if statuses[peer].status.head_hash == head
        and statuses[peer].status.state != mb.NODE_STATE_CATCHING_UP
        and not statuses[peer].status.lost_layers
    ]
    # the learner has had the time to follow valid newer rounds
    waits = draft.now.monotonic - fork.since < AHEAD_SECONDS
    ahead = waits and any(_is_ahead(statuses[peer].status, run.head_round, memory) for peer in side)
    if run.state != "TRAINING" or ahead or not recovery.hold_all_layers(memory, holders):
        return
    electorate = electorate_after(memory, run.head_round)
    may_commit = electorate is not None and electorate.decides([*side, COORDINATOR])
    if not may_commit or _no_commit_is_near(draft, memory):
        point = recovery.RecoveryPoint(run.head_round, len(holders), head)
        recovery.recover_from(draft, run_id, point, f"round {fork.round} had two results")


def _is_ahead(status: mb.NodeStatus, head_round: int, memory: RunMemory) -> bool:
    """Whether a node may hold a round after the newest of the log."""
    well_formed = len(status.head_hash) == SHA256_BYTES and status.head_round <= MAX_INTEGER
    return well_formed and status.head_round > head_round and status.head_hash not in memory.void_manifest_hashes


def _no_commit_is_near(draft: Draft, memory: RunMemory) -> bool:
    age, usual = draft.now.monotonic - memory.head_known_since, memory.commit_seconds
    just_committed = 0 < age <= min(JUST_COMMITTED_SECONDS, usual / 4)
    return just_committed or age >= 2 * max(usual, memory.spec.sync.round_max_seconds.total_seconds())
