"""Reports of rounds and losses: checked here, and stored once even if they arrive several times. Pure.

A node resends a report until the coordinator knows its round, so receiving it twice must be harmless. A report that is
provably wrong is logged as an event and dropped: it must neither end the node's heartbeats nor be sent again. Rounds
are stored in order. A report of a round whose predecessor is unknown is ignored: `learner.py` asks nodes for the
missing rounds, and the node sends its report again.
"""

from __future__ import annotations

from dataclasses import replace

from google.protobuf.message import DecodeError

from atoll.coordinator.rounds import credits
from atoll.coordinator.rounds.round_checks import check_reported_head, check_votes, report_key, row_from_report
from atoll.coordinator.rounds.source_losses import KEPT_EVALUATIONS, MAX_LOSS, by_names, check_sources, fold, to_text
from atoll.coordinator.sanitize import clean
from atoll.coordinator.state import run_states
from atoll.coordinator.state.draft import Draft, charge_refusal, charge_row
from atoll.coordinator.state.kept_rounds import rounds_held_elsewhere, update_kept_rounds
from atoll.coordinator.state.known_nodes import known_nodes
from atoll.coordinator.state.rate_limits import METRICS_RATE, REFUSED_REPORTS_RATE, STORED_ROWS_RATE
from atoll.coordinator.state.run_memory import RunMemory, attempt_key, commit_from_row
from atoll.coordinator.store.records import Evaluation, Round, Run
from atoll.coordinator.store.retention import THIN_EVERY
from atoll.core.errors import AtollError, PeerMisbehaved
from atoll.core.manifest import manifest_hash, verify_votes
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

RECENT_MANIFESTS = 32  # kept in memory, because a second result of one of these rounds proves which members voted twice
DROPPED_SECONDS = 10.0  # dropped reports of this period share one event
_MAX_NAMED_NODES = 5  # in one event


def apply_round_report(draft: Draft, peer_id: str, run_id: str, report: mb.RoundReport) -> None:
    """Store how a round ended, move the head, and finish the run when its tokens are reached."""
    run, memory = draft.state.runs[run_id], draft.state.memory[run_id]
    if report.round.number > run.head_round + 1 or _is_known_report(run, memory, peer_id, report):
        return
    try:
        row = row_from_report(draft.state, _when(report, draft.now.unix_ms), peer_id, run, report)
        if row.committed:
            commit_round(draft, peer_id, row, report)
        elif _charge_row(draft, peer_id):
            _log_round(draft, row)
            draft.add_abandoned(run_id, attempt_key(row))
            message = f"round {row.number} was abandoned: {row.reason}"
            draft.event("round.abandoned", run_id, str(row.number), message)
    except AtollError as error:
        reject(draft, run_id, peer_id, "round", error)


def _when(report: mb.RoundReport, now_ms: int) -> int:
    """When a round ended, by its manifest, because a report may have waited for the coordinator.

    Never in the future.
    """
    if not report.committed:
        return now_ms
    try:
        committed_ms = manifest_pb2.Manifest.FromString(report.manifest.payload).committed_unix_ms
    except DecodeError:  # the checks below refuse it
        return now_ms
    return committed_ms if 0 < committed_ms < now_ms else now_ms


def apply_evaluation_report(draft: Draft, peer_id: str, run_id: str, report: mb.EvaluationReport) -> None:
    """Store a validation loss. A round may be evaluated twice; the later report replaces the earlier."""
    run, memory = draft.state.runs[run_id], draft.state.memory[run_id]
    if report.round > run.head_round:
        return  # the node sends it again once the round is known
    try:
        tokens = _check_evaluation(peer_id, memory, report)
        check_sources(memory.spec, report.sources)
    except AtollError as error:
        reject(draft, run_id, peer_id, "evaluation", error)
        return
    if (run.loss and report.round <= run.loss_round) and not _charge_row(draft, peer_id):
        return
    sources = to_text(_fold_sources(draft, peer_id, run, report))
    run = draft.state.runs[run_id]
    draft.log(Evaluation(run_id, report.round, report.loss, tokens, sources))
    if report.round >= run.loss_round:
        draft.put(replace(run, loss_round=report.round, loss=report.loss, sources=sources))


def _fold_sources(draft: Draft, peer_id: str, run: Run, report: mb.EvaluationReport) -> list[mb.SourceLoss]:
    """The sources of a checked report under the run's names. Members not on probation may add names."""
    if not report.sources or not known_nodes(draft.state, [peer_id]):
        return by_names(run.source_names, report.sources)
    memory = draft.state.memory[run.run_id]
    evaluated = memory.sources_evaluated + (not run.loss or report.round > run.loss_round)
    oldest = evaluated - KEPT_EVALUATIONS
    names, folded = fold(
        run.source_names,
        report.sources,
        {name for name in run.source_names if memory.source_seen.get(name, 0) <= oldest},
    )
    reported = {source.name for source in report.sources}
    seen = {name: evaluated if name in reported else memory.source_seen.get(name, 0) for name in names}
    draft.remember(run.run_id, sources_evaluated=evaluated, source_seen=seen)
    if names != run.source_names:
        draft.put(replace(run, source_names=names))
    return folded


def log_dropped_reports(draft: Draft) -> None:
    """Log one event for each node that exceeded its report limit, with the number of dropped reports."""
    for peer_id, live in draft.state.live.items():
        if live.dropped_reports and draft.now.monotonic - live.dropped_since >= DROPPED_SECONDS:
            draft.set_live(peer_id, replace(live, dropped_reports=0))
            node = draft.state.nodes[peer_id]
            limits = (
                f"{STORED_ROWS_RATE.per_second:g} rows a second, burst {STORED_ROWS_RATE.burst:g}; "
                f"metrics of {METRICS_RATE.per_second:g} rounds a second, burst {METRICS_RATE.burst:g}"
            )
            message = f"{live.dropped_reports} reports of {node.name} were dropped: it exceeded its limit ({limits})"
            draft.event("reports.dropped", node.run_id, peer_id, message)


# --- rounds that committed ---------------------------------------------------------------------------


def _is_known_report(run: Run, memory: RunMemory, peer_id: str, report: mb.RoundReport) -> bool:
    """True if this outcome is stored already, or if the round is older than those in memory."""
    known, key = memory.committed.get(report.round.number), report_key(report)
    if not report.committed:
        return key in memory.abandoned_attempts or (known is not None and known.attempt == key)
    if known is None:
        return report.round.number <= run.head_round
    if known.manifest_hash != manifest_hash(report.manifest.payload):
        return False
    completes = not known.reported and (known.opener, known.attempt) == (peer_id, key)
    return known.committed_tokens is not None and not completes


def commit_round(
    draft: Draft, sender: str, row: Round, report: mb.RoundReport, *, held_by_majority: bool = False
) -> None:
    """Commit the round that `sender` reported. Raises an error if it is invalid. Verifies signatures last.

    Its votes must be a quorum of its electorate, unless a majority of the plan's members hold it.
    """
    if draft.state.live[sender].refusal_allowance.spend(REFUSED_REPORTS_RATE, draft.now.monotonic) is None:
        raise PeerMisbehaved("this node has no allowance left for rejected reports")
    memory = draft.state.memory[row.run_id]
    head, row = check_reported_head(draft.state, draft.state.runs[row.run_id], row, report)
    if not held_by_majority:
        check_votes(head, memory, draft.state.operator_key)
    verify_votes(head)
    append_round(draft, row)


def append_round(draft: Draft, row: Round) -> None:
    """Append a checked round to the log, move the head, and finish the run when its tokens are reached."""
    run_id, number = row.run_id, row.number
    memory = draft.state.memory[run_id]
    known = memory.committed.get(number)
    # otherwise the opener reports a round that was learned before
    is_new = known is None or known.committed_tokens is None
    if is_new:
        _log_round(draft, row)
        _credit(draft, row)
        draft.event("round.committed", run_id, str(number), _committed_sentence(draft, row))
    else:
        draft.log(row)
    manifests = {**memory.recent_manifests, number: row.manifest}
    newest = max(number, draft.state.runs[run_id].head_round)
    draft.remember(
        run_id,
        recent_manifests={it: held for it, held in manifests.items() if it > newest - RECENT_MANIFESTS},
        committed={**memory.committed, number: commit_from_row(row, memory.committed.get(number - 1))},
        abandoned_attempts=memory.abandoned_attempts - {attempt_key(row)},
    )
    run = draft.state.runs[run_id]
    if is_new and number >= run.head_round:  # equal: a base of which only the hash was known
        zeroed = run.parts_zeroed + row.parts_zeroed
        draft.put(replace(run, head_round=number, committed_tokens=row.committed_tokens, parts_zeroed=zeroed))
        if number == 1:
            update_kept_rounds(draft, run_id)
        now = draft.now.monotonic
        before = memory.committed.get(number - 1)
        # otherwise the previous round may have been learned late
        timed = row.seconds > 0 and before is not None and before.reported
        seconds = now - memory.head_known_since if timed else memory.commit_seconds
        draft.remember(run_id, head_known_since=now, commit_seconds=seconds)
        draft.forget_votes(run_id, [decided for decided in memory.votes if decided <= number])
        if number // THIN_EVERY > run.head_round // THIN_EVERY:
            draft.compact(run_id, rounds_held_elsewhere(draft.state, run_id))
        run_states.finish_if_due(draft, run_id)


def _credit(draft: Draft, row: Round) -> None:
    """Credit a round that is newer than all known ones. A base that is known by its hash may have been counted."""
    run = draft.state.runs[row.run_id]
    if row.number > run.head_round:
        committed = manifest_pb2.CommittedManifest.FromString(row.manifest)
        manifest = manifest_pb2.Manifest.FromString(committed.payload)
        credits.count_round(draft, row.run_id, manifest, max(row.reported_ms, run.created_ms))


def _log_round(draft: Draft, row: Round) -> None:
    run, memory = draft.state.runs[row.run_id], draft.state.memory[row.run_id]
    draft.log(row)
    if attempt_key(row) not in memory.abandoned_attempts:
        draft.put(replace(run, rounds_opened=run.rounds_opened + 1))


def _committed_sentence(draft: Draft, row: Round) -> str:
    absent = row.members - len(row.present)
    nodes = draft.state.nodes
    screened = [nodes[peer].name if peer in nodes else peer for peer in row.screened[:_MAX_NAMED_NODES]]
    more = f" and {len(row.screened) - _MAX_NAMED_NODES} more" if len(row.screened) > _MAX_NAMED_NODES else ""
    notes = [
        f"{absent} of them absent at its end" if absent else "",
        f"{row.partial} in some sums only" if row.partial else "",
        f"{row.parts_zeroed} parts zeroed" if row.parts_zeroed else "",
        f"screening excluded {', '.join(screened)}{more} from most sums" if screened else "",
    ]
    by = "one node" if row.members == 1 else f"{row.members} nodes"
    lasted = f" in {row.seconds:.1f} s" if row.seconds else ", learned later"
    summary = f"round {row.number} committed by {by}: {row.tokens} tokens{lasted}"
    return "; ".join([summary, *(note for note in notes if note)])


# --- allowances --------------------------------------------------------------------------------------


def _charge_row(draft: Draft, peer_id: str) -> bool:
    """Charge one row to this node's limit. If the limit is reached, count a dropped report and return False."""
    if charge_row(draft, peer_id):
        return True
    drop(draft, peer_id)
    return False


def reject(draft: Draft, run_id: str, peer_id: str, kind: str, error: AtollError) -> None:
    """Log an event that a report of this node was rejected, within the node's allowance for such events."""
    if not charge_refusal(draft, peer_id):
        drop(draft, peer_id)
        return
    name = draft.state.nodes[peer_id].name
    draft.event(f"{kind}.rejected", run_id, peer_id, f"{kind} report of {name} was rejected: {clean(str(error), 300)}")


def drop(draft: Draft, peer_id: str) -> None:
    """Count a dropped report of this node. One event reports all of them."""
    live = draft.state.live.get(peer_id)
    if live is not None:
        since = live.dropped_since if live.dropped_reports else draft.now.monotonic
        draft.set_live(peer_id, replace(live, dropped_reports=live.dropped_reports + 1, dropped_since=since))


# --- losses ----------------------------------------------------------------------------------------


def _check_evaluation(peer_id: str, memory: RunMemory, report: mb.EvaluationReport) -> int:
    """Tokens of the evaluated round. Raises `PeerMisbehaved` if this node cannot have evaluated it.

    The opener and the members present at the round's end can evaluate it. Any member of any plan can evaluate genesis.
    """
    commit = memory.committed.get(report.round)
    if commit is None or commit.committed_tokens is None:
        raise PeerMisbehaved(f"evaluation of round {report.round}, which is not known to have committed")
    if report.round:
        allowed = peer_id in commit.present or peer_id == commit.opener
    else:
        allowed = any(peer_id in members for members in memory.token_caps.values())
    if not allowed:
        raise PeerMisbehaved(f"evaluation of round {report.round} by a node that was not part of it")
    if not 0 <= report.loss <= MAX_LOSS:  # also refuses NaN
        raise PeerMisbehaved(f"the loss of round {report.round} is {report.loss}; must be 0 to {MAX_LOSS:g}")
    return commit.committed_tokens
