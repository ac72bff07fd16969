"""What nodes report about rounds, losses and genesis: checked here, then stored once however often it comes. Pure.

Reports are resent until they are acknowledged, so every one of them must be harmless to receive twice. One
that cannot be true is told in the event log and dropped: it must neither stop the node's heartbeats nor
come again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from atoll.coordinator.state import lifecycle
from atoll.coordinator.state.records import Evaluation, Round, Run
from atoll.coordinator.state.snapshot import Commit, Draft, RoundKey, RunMemory
from atoll.coordinator.text import clean
from atoll.core.data_position import DataPosition
from atoll.core.errors import AtollError, PeerMisbehaved
from atoll.core.manifest import Head, contributors, manifest_hash, read_head, require_signers
from atoll.core.run_spec import parse_run_spec
from atoll.v1 import manifest_pb2, plan_pb2
from atoll.v1 import membership_pb2 as mb

MAX_LAYERS = 4096
MAX_GAP = 10_000  # rounds between the head and a committed one that is told before those between
MAX_ATTEMPT = 10_000
MAX_LOSS = 1e6
_MAX = 2**62  # databases keep 63 bits
_DIGEST_BYTES = 32


def take_round(draft: Draft, peer_id: str, run_id: str, report: mb.RoundReport) -> None:
    """Store how a round ended, move the head, and finish the run when its tokens are reached."""
    run, memory = draft.state.runs[run_id], draft.state.memory[run_id]
    number, key = report.round.number, _key(report)
    if report.committed:
        if number in memory.committed and memory.committed[number].manifest_hash == manifest_hash(
            report.manifest.payload
        ):
            return
    elif key in memory.opened:
        return
    try:
        row = _checked_round(draft, peer_id, run, memory, report)
    except AtollError as error:
        _reject(draft, run_id, peer_id, "round", error)
        return
    draft.log(row)
    commit = Commit(row.manifest_hash, row.plan_version, row.committed_tokens)
    committed = {**memory.committed, number: commit} if row.committed else memory.committed
    draft.remember(run_id, opened=memory.opened | {key}, committed=committed)
    if not row.committed:
        draft.event("round.abandoned", run_id, str(number), f"round {number} was abandoned: {row.reason}")
        return
    told = f"round {number} committed by {row.members} nodes: {row.tokens} tokens in {row.seconds:.1f} s"
    draft.event("round.committed", run_id, str(number), told)
    if number > run.head_round:
        draft.put(replace(run, head_round=number, committed_tokens=row.committed_tokens))
        lifecycle.finish_if_due(draft, run_id)


def take_evaluation(draft: Draft, peer_id: str, run_id: str, report: mb.EvaluationReport) -> None:
    """Store a validation loss; the same round may be evaluated twice, the later word stands."""
    run, memory = draft.state.runs[run_id], draft.state.memory[run_id]
    try:
        commit = _evaluated(peer_id, memory, report)
    except AtollError as error:
        _reject(draft, run_id, peer_id, "evaluation", error)
        return
    draft.log(Evaluation(run_id, report.round, report.loss, commit.committed_tokens))
    if report.round >= run.loss_round:
        draft.put(replace(run, loss_round=report.round, loss=report.loss))


def take_genesis(draft: Draft, peer_id: str, run_id: str, report: mb.GenesisReport) -> None:
    """The first anchor: check it, keep it, issue plan 1. Anyone but the writer who was asked is ignored."""
    run, memory = draft.state.runs[run_id], draft.state.memory[run_id]
    if run.state != "GENESIS" or memory.writer != peer_id or peer_id in memory.passed_over:
        return
    try:
        _check_genesis(run, peer_id, report)
    except AtollError as error:
        draft.remember(run_id, passed_over=memory.passed_over | {peer_id})
        _reject(draft, run_id, peer_id, "genesis", error)
        return
    table, manifest = report.layers.SerializeToString(), report.manifest.SerializeToString()
    draft.put(replace(run, layers=table, genesis=manifest))
    draft.remember(run_id, committed={**memory.committed, 0: Commit(manifest_hash(report.manifest.payload))})
    draft.event("run.genesis-written", run_id, peer_id, f"genesis has {len(report.layers.layers)} layers")
    lifecycle.begin_training(draft, run_id)


def _reject(draft: Draft, run_id: str, peer_id: str, what: str, error: AtollError) -> None:
    name = draft.state.nodes[peer_id].name
    draft.event(f"{what}.rejected", run_id, peer_id, f"{what} report of {name} was dropped: {clean(str(error), 300)}")


def _evaluated(peer_id: str, memory: RunMemory, report: mb.EvaluationReport) -> Commit:
    """The round that was evaluated, if this node can have done it: by a member of its plan, genesis by any member."""
    commit = memory.committed.get(report.round)
    if commit is None:
        raise PeerMisbehaved(f"an evaluation of round {report.round}, which is not known to have committed")
    plans = [memory.caps[commit.plan_version]] if commit.plan_version else memory.caps.values()
    if not any(peer_id in members for members in plans):
        raise PeerMisbehaved(f"an evaluation of round {report.round} by a node that was not part of it")
    if not 0 <= report.loss <= MAX_LOSS:  # false for NaN too
        raise PeerMisbehaved(f"an evaluation of round {report.round} with a loss that cannot be")
    return commit


def _key(report: mb.RoundReport) -> RoundKey:
    return (report.round.number, report.round.plan_version, report.round.fragment, report.round.attempt)


def _checked_round(draft: Draft, peer_id: str, run: Run, memory: RunMemory, report: mb.RoundReport) -> Round:
    """The row of a report that can be true. Raises `PeerMisbehaved`, `SignatureInvalid`, `ProtocolMismatch`."""
    named = report.round
    if named.run_id != run.run_id or peer_id not in memory.caps.get(named.plan_version, {}):
        raise PeerMisbehaved(f"round {named.number} under plan {named.plan_version} is not one this node was part of")
    ahead = MAX_GAP if report.committed else 2  # who abandons a round knows the one before it, or is about to tell it
    if not 1 <= named.number <= run.head_round + ahead:
        raise PeerMisbehaved(f"round {named.number} is too far from round {run.head_round}, the newest known")
    if named.attempt > MAX_ATTEMPT or named.fragment >= MAX_LAYERS:
        raise PeerMisbehaved(f"round {named.number} has an attempt or a fragment that cannot be")
    if not math.isfinite(report.seconds) or report.wire_bytes > _MAX:
        raise PeerMisbehaved(f"the report of round {named.number} holds a value that cannot be")
    row = Round(
        run_id=run.run_id,
        number=named.number,
        plan_version=named.plan_version,
        fragment=named.fragment,
        attempt=named.attempt,
        committed=report.committed,
        reason=clean(report.reason),
        opener=peer_id,
        seconds=max(0.0, report.seconds),
        reported_ms=draft.now.unix_ms,
        wire_bytes=report.wire_bytes,
    )
    return _with_manifest(row, run, memory, report) if report.committed else row


def _with_manifest(row: Round, run: Run, memory: RunMemory, report: mb.RoundReport) -> Round:
    """The row of a committed round: every member of its plan contributed and signed, and the chain holds.

    Openers tell their rounds in any order after an outage, so the round before it may be unknown. Then the
    signatures of all members stand for it: nobody forges a round without each of them.
    """
    head = read_head(report.manifest, run.run_id)
    if row.number in memory.committed:
        raise PeerMisbehaved(f"round {row.number} was committed before, with another manifest")
    if head.manifest.round != report.round:
        raise PeerMisbehaved(f"the manifest is of round {head.round}, the report of round {row.number}")
    tokens = _contributed(head, memory.caps[row.plan_version])
    _check_layers(head.manifest, len(plan_pb2.LayerTable.FromString(run.layers).layers))
    require_signers(head, contributors(head))
    _check_place(head, run, memory, tokens)
    return replace(
        row,
        tokens=tokens,
        committed_tokens=head.committed_tokens,
        members=len(head.manifest.contributions),
        parts_zeroed=head.manifest.parts_zeroed,
        manifest_hash=head.hash,
        manifest=report.manifest.SerializeToString(),
    )


def _contributed(head: Head, caps: Mapping[str, int]) -> int:
    """Tokens of a round to which exactly the members of its plan contributed, each within its cap."""
    contributions = head.manifest.contributions
    if sorted(item.peer_id for item in contributions) != sorted(caps):
        raise PeerMisbehaved(f"the contributors of round {head.round} are not the members of its plan")
    for item in contributions:
        if item.tokens > caps[item.peer_id] or item.weight != item.tokens:
            raise PeerMisbehaved(f"round {head.round} counts more tokens of {item.peer_id} than its plan allows")
    return sum(item.tokens for item in contributions)


def _check_place(head: Head, run: Run, memory: RunMemory, tokens: int) -> None:
    """Whether the round fits between those that are known: hash, plan version, tokens of the run."""
    number, total, plan_version = head.round, head.committed_tokens, head.manifest.round.plan_version
    before = memory.committed.get(number - 1)
    if before is not None and head.manifest.previous_hash != before.manifest_hash:
        raise PeerMisbehaved(f"round {number} does not follow the round {number - 1} that we know")
    newest = memory.committed[run.head_round].plan_version
    if (plan_version < newest) if number > run.head_round else (plan_version > newest):
        raise PeerMisbehaved(f"round {number} is under plan {plan_version}, round {run.head_round} under {newest}")
    if number > run.head_round:  # nobody can have trained more than the plans allow
        unknown = number - 1 - run.head_round
        least = run.committed_tokens + tokens
        most = least + unknown * max(sum(caps.values()) for caps in memory.caps.values())
    elif before is not None:
        least = most = before.committed_tokens + tokens
    else:
        least, most = tokens, run.committed_tokens
    if not least <= total <= min(most, _MAX):
        raise PeerMisbehaved(f"round {number} counts tokens that cannot be")


def _check_layers(manifest: manifest_pb2.Manifest, count: int) -> None:
    if [item.layer for item in manifest.layers] != list(range(count)):
        raise PeerMisbehaved(f"the manifest does not list the {count} layers in order")
    if any(len(item.anchor_digest) != _DIGEST_BYTES for item in manifest.layers) or any(
        len(item.momentum_digest) != _DIGEST_BYTES for item in manifest.layers
    ):
        raise PeerMisbehaved(f"a digest in the manifest is not {_DIGEST_BYTES} bytes long")


def _check_genesis(run: Run, writer: str, report: mb.GenesisReport) -> None:
    table = report.layers.layers
    names = {layer.name for layer in table}
    if not 1 <= len(table) <= MAX_LAYERS or len(names) != len(table) or "" in names:
        raise PeerMisbehaved(f"a layer table has 1 to {MAX_LAYERS} layers with names of their own")
    if report.layers.model_hash != parse_run_spec(run.spec_toml).model_hash():
        raise PeerMisbehaved("the layer table is of another model than the run's")
    head = read_head(report.manifest, run.run_id)
    if head.round != 0 or head.manifest.previous_hash or head.manifest.contributions:
        raise PeerMisbehaved("genesis is round 0, follows nothing and has no contributions")
    if head.manifest.corpus_digest.hex() != run.corpus_digest:
        raise PeerMisbehaved("genesis names another corpus than the run's")
    if head.data != DataPosition() or head.committed_tokens:
        raise PeerMisbehaved("genesis has handed out data already; plan 1 does that")
    _check_layers(head.manifest, len(table))
    require_signers(head, [writer])
