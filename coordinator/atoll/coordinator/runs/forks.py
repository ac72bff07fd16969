"""Forks: two results of one round, each with the votes of a majority of the seats. Pure.

Honest seats cannot cause one (docs/explain/rounds.md), so somebody broke the rules of voting. The coordinator notices
it by a connected node whose head contradicts the log: it asks that node for its last rounds, finds the first that
differs, and checks its votes. Then three things happen without waiting for the operator:

- whoever voted for both results in one ballot is banned, with a proof (`core/proofs.py`);
- the run goes on from the newest round of the log, as after a recovery, so that what was built on the other result is
  void everywhere;
- events tell what happened. A fork of two ballots has no double vote, and nobody is banned for it.

The operator may take a ban back (`atollctl node unban`).
"""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.rounds.reports import reject
from atoll.coordinator.rounds.round_checks import check_size
from atoll.coordinator.runs import admission, recovery
from atoll.coordinator.state.rate_limits import REFUSED_REPORTS_RATE
from atoll.coordinator.state.snapshot import Draft, ForkInquiry, RunMemory, State, electorate_after, epoch_of
from atoll.coordinator.store.records import MAX_INTEGER, SHA256_BYTES, ProofRow
from atoll.core.errors import AtollError, PeerMisbehaved
from atoll.core.identity import peer_id_of
from atoll.core.manifest import Head, parse_head, require_quorum, strip_unknown_manifest_fields, verify_votes
from atoll.core.proofs import double_votes, proof_id, verify_proof
from atoll.core.quorum import MAX_SEATS
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

BATCH = 32  # rounds in one answer
ANSWER_SECONDS = 10.0  # for a node to answer
ASK_AGAIN_SECONDS = 60.0  # about the same head


def look_for_forks(draft: Draft, run_id: str) -> None:
    """Ask a node whose head contradicts the log for the rounds up to that head."""
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    if memory.fork_inquiry is not None:
        if now - memory.fork_inquiry.since < ANSWER_SECONDS:
            return
        draft.remember(run_id, fork_inquiry=None)
    found = _contradicting_heads(draft.state, run_id)
    asked = {peer: it for peer, it in memory.contradictions.items() if peer in found}
    due = [
        (asked[peer][1] if peer in asked else float("-inf"), peer)
        for peer, (_, digest) in found.items()
        if peer not in asked or asked[peer][0] != digest or now - asked[peer][1] >= ASK_AGAIN_SECONDS
    ]
    if due:
        peer = min(due)[1]
        number, digest = found[peer]
        last = min(number, draft.state.runs[run_id].head_round)
        asked[peer] = (digest, now)
        _ask(draft, run_id, peer, last)
    if asked != memory.contradictions:
        draft.remember(run_id, contradictions=asked)


def take_answer(draft: Draft, peer_id: str, run_id: str, answer: mb.ManifestAnswer) -> None:
    """Look for the first round that differs from the log in what a node sends, if it was asked."""
    inquiry = draft.state.memory[run_id].fork_inquiry
    if inquiry is None or (inquiry.peer_id, inquiry.first) != (peer_id, answer.first):
        return
    draft.remember(run_id, fork_inquiry=None)
    try:
        other = _first_difference(draft, peer_id, run_id, answer)
        if other is None:
            return
        memory = draft.state.memory[run_id]
        before = memory.committed.get(other.round - 1)
        if before is None or other.manifest.previous_hash != before.manifest_hash:
            if other.round == inquiry.first > _base_round(memory) + 1:  # they part before that
                _ask(draft, run_id, peer_id, other.round - 1)
            return
        electorate = electorate_after(memory, other.round - 1)
        if electorate is None or other.manifest.epoch != epoch_of(memory.bases, other.round):
            return
        require_quorum(other, electorate, draft.state.operator_key)
        verify_votes(other)
    except AtollError as error:
        reject(draft, run_id, peer_id, "round", error)
        return
    _end_fork(draft, run_id, peer_id, other)


def _ask(draft: Draft, run_id: str, peer_id: str, last: int) -> None:
    """Ask for the rounds up to `last`."""
    first = max(_base_round(draft.state.memory[run_id]) + 1, last - BATCH + 1)
    draft.remember(run_id, fork_inquiry=ForkInquiry(peer_id, first, draft.now.monotonic))


def _base_round(memory: RunMemory) -> int:
    """No fork is older than the newest base: whatever contradicts that is void."""
    return memory.bases[-1].round if memory.bases else 0


def _contradicting_heads(state: State, run_id: str) -> dict[str, tuple[int, bytes]]:
    """Heads of connected nodes that are not in the log, by peer id: round and hash."""
    run, memory = state.runs[run_id], state.memory[run_id]
    if run.state != "TRAINING":
        return {}
    found = {}
    for node in state.members_of(run_id):
        live = state.live.get(node.peer_id)
        if live is None or not live.connected or len(live.status.head_hash) != SHA256_BYTES:
            continue
        number, digest = live.status.head_round, live.status.head_hash
        if not _base_round(memory) < number <= MAX_INTEGER or digest in memory.void_manifest_hashes:
            continue
        known, asked_in_vain = memory.committed.get(number), memory.inquiry.failed if memory.inquiry else frozenset()
        differs = known is not None and known.manifest_hash != digest
        if differs or (number > run.head_round and node.peer_id in asked_in_vain):
            found[node.peer_id] = (number, digest)
    return found


def _first_difference(draft: Draft, peer_id: str, run_id: str, answer: mb.ManifestAnswer) -> Head | None:
    """The first round of the answer that the log has otherwise. Verifies no signature. Raises `AtollError`."""
    live, memory = draft.state.live[peer_id], draft.state.memory[run_id]
    remaining = live.refusal_allowance.spend(REFUSED_REPORTS_RATE, draft.now.monotonic)
    if remaining is None:
        raise PeerMisbehaved("this node has no allowance left for rejected reports")
    draft.set_live(peer_id, replace(live, refusal_allowance=remaining))
    for place, committed in enumerate(answer.manifests[:BATCH]):
        check_size(committed)
        head = parse_head(committed, run_id, max_signatures=MAX_SEATS)
        if head.round != answer.first + place:
            raise PeerMisbehaved(f"it sent round {head.round} instead of round {answer.first + place}")
        known = memory.committed.get(head.round)
        if known is None:
            return None
        if known.manifest_hash != head.hash:
            return Head(strip_unknown_manifest_fields(committed))
    return None


def _end_fork(draft: Draft, run_id: str, peer_id: str, other: Head) -> None:
    """Ban who is proved to have caused it, and make the log's result the only one."""
    point = recovery.choose_recovery_point(draft.state, draft.state.runs[run_id])
    if point is None:
        return  # nobody who is connected holds the log's result: it is looked at again
    memory, number = draft.state.memory[run_id], other.round
    known, name = memory.committed[number].manifest_hash.hex()[:12], draft.state.nodes[peer_id].name
    mine = memory.recent_manifests.get(number)
    proofs = double_votes(Head(manifest_pb2.CommittedManifest.FromString(mine)), other) if mine else ()
    culprits = [_convict(draft, run_id, proof) for proof in proofs]
    proved = f"proofs name {', '.join(culprits)}" if culprits else "no double vote proves who caused it"
    two = f"{known}… in the log and {other.hash.hex()[:12]}… on {name}"
    draft.event("run.forked", run_id, str(number), f"round {number} has two results, {two}; {proved}")
    recovery.recover_from(draft, run_id, point, f"round {number} had two results")


def _convict(draft: Draft, run_id: str, proof: bytes) -> str:
    """Keep a proof, and ban whom it names; returns that name."""
    breach, name = verify_proof(proof), proof_id(proof)
    if breach.culprit == peer_id_of(draft.state.operator_key):
        return "the coordinator's own key"
    node = draft.state.nodes.get(breach.culprit)
    if node is None:
        return breach.culprit
    now_ms = draft.now.unix_ms
    draft.log(ProofRow(run_id, breach.culprit, name, breach.kind, breach.round, now_ms, breach.sentence, proof))
    draft.event("trust.proved", run_id, breach.culprit, f"{node.name} broke the rules: {breach.sentence}; proof {name}")
    admission.ban_node(draft, node, f"proof {name}: {breach.kind}")
    return node.name
