"""Fills gaps in the log of rounds: asks nodes for committed rounds that no opener reported. Pure.

Openers report rounds at once, so usually no node is asked. A round may stay unreported if its opener dies, or while the
coordinator is away. Then heartbeats show newer heads than the newest known round. After `QUIET_SECONDS` the coordinator
asks one node with a newer head for the manifests of the next rounds, which nodes keep on disk. Each round must have the
votes of the electorate that the previous round names. If that node sends nothing valid, the next node is asked.

Nodes delete old manifests. So the coordinator may skip rounds once more than half of the plan's members answered and
none sent the next round. It accepts a later round if more than half of them hold the same manifest of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from atoll.coordinator.rounds.reports import commit_round, reject
from atoll.coordinator.rounds.round_checks import fragments_of, row_from_report
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.run_memory import Inquiry, seats_after
from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import MAX_INTEGER, SHA256_BYTES, Round
from atoll.core.errors import AtollError, PeerMisbehaved
from atoll.core.fragments import fragment_of_round
from atoll.core.manifest import manifest_hash, parse_head
from atoll.core.quorum import MAX_SEATS
from atoll.core.round_id import RoundId
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

MAX_BATCH = 32  # manifests in one answer
QUIET_SECONDS = 2.0  # for the opener's own report to arrive
ANSWER_SECONDS = 10.0  # for a node to answer
RETRY_SECONDS = 30.0  # after all nodes failed to answer


def ask_for_missing_rounds(draft: Draft, run_id: str) -> None:
    """Ask a node, or the next node, if connected nodes have rounds that the coordinator lacks."""
    inquiry, now = draft.state.memory[run_id].inquiry, draft.now.monotonic
    first, ahead = _first_missing(draft.state, run_id), _nodes_ahead(draft.state, run_id)
    if not ahead:
        if inquiry is not None:
            draft.remember(run_id, inquiry=None)
    elif inquiry is None:
        draft.remember(run_id, inquiry=Inquiry(first, now))
    elif inquiry.agreed is None and inquiry.first != first:  # the round was reported in the meantime
        draft.remember(run_id, inquiry=_after(inquiry, first, now))
    elif inquiry.peer_id:
        if inquiry.peer_id not in ahead or now - inquiry.since >= ANSWER_SECONDS:
            _ask_next(draft, run_id, _without(inquiry, inquiry.peer_id))
    elif ahead.keys() <= inquiry.failed:
        if now - inquiry.since >= RETRY_SECONDS:
            _ask_next(draft, run_id, replace(inquiry, failed=frozenset()))
    elif now - inquiry.since >= QUIET_SECONDS:
        _ask_next(draft, run_id, inquiry)


def take_answer(draft: Draft, peer_id: str, run_id: str, answer: mb.ManifestAnswer) -> None:
    """Process the rounds that a node sends, if it was asked for them, and ask for the next ones."""
    inquiry = draft.state.memory[run_id].inquiry
    if inquiry is None or (inquiry.peer_id, inquiry.first) != (peer_id, answer.first):
        return
    if inquiry.agreed is not None:
        _take_later_round(draft, peer_id, run_id, inquiry, inquiry.agreed, answer.manifests[:1])
        return
    error = _learn(draft, peer_id, run_id, answer.manifests[:MAX_BATCH])
    first = _first_missing(draft.state, run_id)
    if first == inquiry.first:
        _ask_next(draft, run_id, _without(replace(inquiry, unable=inquiry.unable | {peer_id}), peer_id))
        return
    inquiry = _after(inquiry, first, draft.now.monotonic)
    if error is not None:
        _ask_next(draft, run_id, _without(inquiry, peer_id))
    elif _nodes_ahead(draft.state, run_id).get(peer_id, 0) > first:
        _ask(draft, run_id, inquiry, peer_id)
    else:  # at most its newest round is missing, which its opener reports
        draft.remember(run_id, inquiry=inquiry)


def _first_missing(state: State, run_id: str) -> int:
    """The next round, or the newest one if only its hash is known."""
    newest = state.runs[run_id].head_round
    commit = state.memory[run_id].committed.get(newest)
    return newest if commit is not None and commit.committed_tokens is None else newest + 1


def _nodes_ahead(state: State, run_id: str) -> Mapping[str, int]:
    """Head rounds of connected nodes that may have rounds which the coordinator lacks, by peer id."""
    run, memory = state.runs[run_id], state.memory[run_id]
    if run.state not in ("TRAINING", "PAUSED") or not run.genesis:
        return {}
    first = _first_missing(state, run_id)
    return {
        peer: live.status.head_round
        for peer, live in state.live.items()
        if live.connected
        and first <= live.status.head_round <= MAX_INTEGER
        and len(live.status.head_hash) == SHA256_BYTES
        and live.status.head_hash not in memory.void_manifest_hashes
        and state.nodes[peer].run_id == run_id
    }


def _after(inquiry: Inquiry, first: int, now: float) -> Inquiry:
    """The inquiry for round `first` as the next one. Nodes that failed before are not asked first."""
    return Inquiry(first, now, failed=inquiry.failed)


def _without(inquiry: Inquiry, peer_id: str) -> Inquiry:
    return replace(inquiry, failed=inquiry.failed | {peer_id})


def _ask_next(draft: Draft, run_id: str, inquiry: Inquiry) -> None:
    """Ask the next node that has not failed.

    The lowest head comes first, so a false claim to be far ahead comes last.
    """
    ahead = _nodes_ahead(draft.state, run_id)
    if inquiry.agreed is not None:
        members = _members(draft.state, run_id)
        ahead = {peer: number for peer, number in ahead.items() if peer in members and number >= inquiry.first}
    unasked = [(number, peer) for peer, number in ahead.items() if peer not in inquiry.failed]
    if unasked:
        _ask(draft, run_id, inquiry, min(unasked)[1])
    elif inquiry.agreed is None and (later := _later_round(draft.state, run_id, inquiry.unable)) is not None:
        _ask_next(draft, run_id, Inquiry(later[0], inquiry.since, agreed=later[1]))
    else:
        failed = frozenset(_nodes_ahead(draft.state, run_id))
        draft.remember(run_id, inquiry=Inquiry(_first_missing(draft.state, run_id), draft.now.monotonic, failed=failed))


def _ask(draft: Draft, run_id: str, inquiry: Inquiry, peer_id: str) -> None:
    draft.remember(run_id, inquiry=replace(inquiry, peer_id=peer_id, since=draft.now.monotonic))


# --- the next rounds ---------------------------------------------------------------------------------


def _learn(
    draft: Draft, sender: str, run_id: str, manifests: Sequence[manifest_pb2.CommittedManifest]
) -> AtollError | None:
    """Commit the next rounds from their manifests in order, up to the first invalid one. Returns its error."""
    try:
        for committed in manifests:
            if draft.state.runs[run_id].state not in ("TRAINING", "PAUSED"):
                break  # the run finished with the previous round
            first = _first_missing(draft.state, run_id)
            row, report = _read(draft, run_id, committed)
            if row.number > first:
                raise PeerMisbehaved(f"it sent round {row.number} instead of round {first}")
            if row.number == first:
                commit_round(draft, sender, row, report)
    except AtollError as error:
        reject(draft, run_id, sender, "round", error)
        return error
    return None


def _read(draft: Draft, run_id: str, committed: manifest_pb2.CommittedManifest) -> tuple[Round, mb.RoundReport]:
    """The report that the opener would have sent, without seconds and bytes, which only the opener knows."""
    state, now_ms = draft.state, draft.now.unix_ms
    run, memory = state.runs[run_id], state.memory[run_id]
    head = parse_head(committed, run_id, max_signatures=MAX_SEATS)
    version, fragment = head.ballot.plan_version, head.manifest.round.fragment
    if version != head.manifest.round.plan_version:  # committed in a later attempt, perhaps under other cuts
        fragment = fragment_of_round(head.round, fragments_of(run, memory, version))
    attempt = RoundId(run_id, version, fragment, head.round, head.ballot.attempt)
    members, seats = memory.token_caps.get(version, {}), seats_after(memory, head.round - 1) or head.seats
    opener = attempt.opener([peer for peer in seats if peer in members])
    report = mb.RoundReport(round=attempt.to_proto(), committed=True, manifest=committed)
    committed_ms = head.manifest.committed_unix_ms
    unix_ms = committed_ms if 0 < committed_ms < now_ms else now_ms
    return row_from_report(state, unix_ms, opener, run, report), report


# --- after a gap -------------------------------------------------------------------------------------


def _members(state: State, run_id: str) -> tuple[str, ...]:
    """Members of the plan that are not on probation."""
    plan = state.memory[run_id].plan
    return tuple(peer for peer in plan.members if peer not in plan.on_probation) if plan is not None else ()


def _later_round(state: State, run_id: str, unable: frozenset[str]) -> tuple[int, Mapping[str, bytes]] | None:
    """The newest round that more than half of the plan's members have reached, with its hash on these members.

    None unless more than half are `unable` to send the next round, because a slow network is no reason to skip rounds.
    Also None while two nodes have the log's newest round: after a fork, the others may have another history.
    """
    ahead, members = _nodes_ahead(state, run_id), _members(state, run_id)
    if _several_have_the_head(state, run_id):
        return None
    if 2 * len(unable.intersection(members)) <= len(members):
        return None
    heads = sorted((ahead[peer] for peer in members if peer in ahead), reverse=True)
    if 2 * len(heads) <= len(members):
        return None
    number = heads[len(members) // 2]
    return number, {peer: state.live[peer].status.head_hash for peer in members if ahead.get(peer) == number}


def _several_have_the_head(state: State, run_id: str) -> bool:
    """Whether at least two members report the log's newest round as their head. A single one may lie or be stuck."""
    number, head = state.runs[run_id].head_round, state.memory[run_id].committed.get(state.runs[run_id].head_round)
    statuses = [live.status for peer in _members(state, run_id) if (live := state.live.get(peer)) and live.connected]
    if head is None:
        return False
    return sum((it.head_round, it.head_hash) == (number, head.manifest_hash) for it in statuses) > 1


def _take_later_round(
    draft: Draft,
    sender: str,
    run_id: str,
    inquiry: Inquiry,
    agreed: Mapping[str, bytes],
    manifests: Sequence[manifest_pb2.CommittedManifest],
) -> None:
    """Continue from a later round once more than half of the plan's members hold its manifest."""
    members = _members(draft.state, run_id)
    for committed in manifests:
        agreed = {**agreed, sender: manifest_hash(committed.payload)}
        holders = [peer for peer in members if agreed.get(peer) == agreed[sender]]
        if 2 * len(holders) > len(members):
            held = f"{len(holders)} of {len(members)} nodes"
            if _skip_to(draft, sender, run_id, inquiry.first, committed, held):
                return
    _ask_next(draft, run_id, _without(replace(inquiry, agreed=agreed), sender))


def _skip_to(
    draft: Draft, sender: str, run_id: str, number: int, committed: manifest_pb2.CommittedManifest, held: str
) -> bool:
    """Commit round `number` without the rounds before it. Returns False if its manifest is not valid."""
    newest = draft.state.runs[run_id].head_round
    try:
        row, report = _read(draft, run_id, committed)
        if row.number != number:
            raise PeerMisbehaved(f"it sent round {row.number} instead of round {number}")
        commit_round(draft, sender, row, report, held_by_majority=True)
    except AtollError as error:
        reject(draft, run_id, sender, "round", error)
        return False
    if number > newest + 1:
        _note_gap(draft, run_id, newest, number, held)
    draft.remember(run_id, inquiry=None)
    return True


def _note_gap(draft: Draft, run_id: str, newest: int, number: int, held: str) -> None:
    run = draft.state.runs[run_id]
    draft.put(replace(run, rounds_opened=run.rounds_opened + number - newest - 1))
    lost = f"round {newest + 1:,} was" if number == newest + 2 else f"rounds {newest + 1:,} to {number - 1:,} were"
    message = f"{lost} not reported by anybody; went on from round {number:,}, which {held} hold"
    draft.event("run.gap", run_id, str(number), message)
