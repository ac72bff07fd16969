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
from atoll.coordinator.state.snapshot import Commit, Draft, RoundKey, RunMemory, electorate_after, is_void
from atoll.coordinator.text import clean
from atoll.core.data_position import DataPosition
from atoll.core.errors import AtollError, PeerMisbehaved
from atoll.core.manifest import Head, manifest_hash, read_head, require_quorum, require_signers
from atoll.core.run_spec import parse_run_spec
from atoll.v1 import manifest_pb2, plan_pb2
from atoll.v1 import membership_pb2 as mb

MAX_LAYERS = 4096
MAX_GAP = 10_000  # rounds between the head and a committed one that is told before those between
MAX_ATTEMPT = 10**6  # weeks without a majority
MAX_LOSS = 1e6
_MAX = 2**62  # databases keep 63 bits
_DIGEST_BYTES = 32


def take_round(draft: Draft, peer_id: str, run_id: str, report: mb.RoundReport) -> None:
    """Store how a round ended, move the head, and finish the run when its tokens are reached."""
    run, memory = draft.state.runs[run_id], draft.state.memory[run_id]
    number, key = report.round.number, _key(report)
    known = memory.committed.get(number)
    if report.committed:
        told = known is not None and known.committed_tokens is not None
        if known is not None and told and known.manifest_hash == manifest_hash(report.manifest.payload):
            return
    elif key in memory.opened:
        return
    try:
        row = _checked_round(draft, peer_id, run, memory, report)
    except AtollError as error:
        _reject(draft, run_id, peer_id, "round", error)
        return
    draft.log(row)
    committed = {**memory.committed, number: commit_of(row)} if row.committed else memory.committed
    draft.remember(run_id, opened=memory.opened | {key}, committed=committed)
    if not row.committed:
        draft.event("round.abandoned", run_id, str(number), f"round {number} was abandoned: {row.reason}")
        return
    draft.event("round.committed", run_id, str(number), _committed_sentence(row))
    if number >= run.head_round:  # equal: a base that we only knew by its hash
        draft.put(replace(run, head_round=number, committed_tokens=row.committed_tokens))
        draft.forget_votes(run_id, [decided for decided in memory.votes if decided <= number])
        lifecycle.finish_if_due(draft, run_id)


def commit_of(row: Round) -> Commit:
    """What is remembered of a committed round."""
    return Commit(
        manifest_hash=row.manifest_hash,
        plan_version=row.made_under,
        committed_tokens=row.committed_tokens,
        previous_hash=row.previous_hash,
        present=frozenset(row.present),
        opener=row.opener,
        members=row.members,
        partial=row.partial,
        parts_zeroed=row.parts_zeroed,
    )


def take_evaluation(draft: Draft, peer_id: str, run_id: str, report: mb.EvaluationReport) -> None:
    """Store a validation loss; the same round may be evaluated twice, the later word stands."""
    run, memory = draft.state.runs[run_id], draft.state.memory[run_id]
    try:
        tokens = _evaluated(peer_id, memory, report)
    except AtollError as error:
        _reject(draft, run_id, peer_id, "evaluation", error)
        return
    draft.log(Evaluation(run_id, report.round, report.loss, tokens))
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


def _committed_sentence(row: Round) -> str:
    gone = row.members - len(row.present)
    notes = [
        f"{gone} of them gone by then" if gone else "",
        f"{row.partial} only in part" if row.partial else "",
        f"{row.parts_zeroed} parts zeroed" if row.parts_zeroed else "",
    ]
    told = f"round {row.number} committed by {row.members} nodes: {row.tokens} tokens in {row.seconds:.1f} s"
    return "; ".join([told, *(note for note in notes if note)])


def _evaluated(peer_id: str, memory: RunMemory, report: mb.EvaluationReport) -> int:
    """Tokens of the round that was evaluated, if this node can have done it.

    Who opened the round or was present in it can; genesis, any member of any plan.
    """
    commit = memory.committed.get(report.round)
    if commit is None or commit.committed_tokens is None:
        raise PeerMisbehaved(f"an evaluation of round {report.round}, which is not known to have committed")
    if report.round:
        allowed = peer_id in commit.present or peer_id == commit.opener
    else:
        allowed = any(peer_id in members for members in memory.caps.values())
    if not allowed:
        raise PeerMisbehaved(f"an evaluation of round {report.round} by a node that was not part of it")
    if not 0 <= report.loss <= MAX_LOSS:  # false for NaN too
        raise PeerMisbehaved(f"an evaluation of round {report.round} with a loss that cannot be")
    return commit.committed_tokens


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
    return _with_manifest(row, draft.state.operator_key, run, memory, report) if report.committed else row


def _with_manifest(row: Round, operator_key: bytes, run: Run, memory: RunMemory, report: mb.RoundReport) -> Round:
    """The row of a committed round: made under a plan of ours, decided by those who decide it, and the chain holds."""
    head = read_head(report.manifest, run.run_id)
    made = head.manifest.round
    known = memory.committed.get(row.number)
    if known is not None and known.manifest_hash != head.hash:
        raise PeerMisbehaved(f"round {row.number} was committed before, with another manifest")
    if (made.number, made.fragment) != (row.number, row.fragment) or head.ballot != (row.plan_version, row.attempt):
        raise PeerMisbehaved(f"the manifest is of round {head.round}, the report of another attempt or round")
    if is_void(memory.bases, row.number, made.plan_version):
        raise PeerMisbehaved(f"round {row.number} is void: the run was recovered from before it")
    tokens = _contributed(head, memory.caps.get(made.plan_version, {}))
    _check_layers(head.manifest, len(plan_pb2.LayerTable.FromString(run.layers).layers))
    _require_votes(head, memory, operator_key)
    _check_place(head, run, memory, tokens)
    contributions = head.manifest.contributions
    return replace(
        row,
        tokens=tokens,
        committed_tokens=head.committed_tokens,
        members=len(contributions),
        parts_zeroed=head.manifest.parts_zeroed,
        manifest_hash=head.hash,
        manifest=report.manifest.SerializeToString(),
        previous_hash=head.manifest.previous_hash,
        made_under=made.plan_version,
        present=tuple(sorted(head.electorate.members)),
        partial=sum(item.partial for item in contributions),
    )


def _contributed(head: Head, caps: Mapping[str, int]) -> int:
    """Tokens of a round to which members of its plan contributed, each once and within its cap."""
    contributions = head.manifest.contributions
    names = {item.peer_id for item in contributions}
    if not head.electorate.members or len(names) != len(contributions) or not names <= caps.keys():
        raise PeerMisbehaved(f"the contributors of round {head.round} are not members of its plan")
    for item in contributions:
        counted = 0 if item.partial else item.weight  # what is only in some of the sums does not count
        if item.weight > caps[item.peer_id] or item.tokens != counted:
            raise PeerMisbehaved(f"round {head.round} counts more tokens of {item.peer_id} than its plan allows")
    return sum(item.tokens for item in contributions)


def _require_votes(head: Head, memory: RunMemory, operator_key: bytes) -> None:
    """Raise `SignatureInvalid` unless those who decide the round voted for it.

    Openers tell their rounds in any order after an outage, so the round before may be unknown and with it who
    decides. Then a strict majority of those who were present in this one will do, or of those who decided after
    the newest round before it that is known.
    """
    electorate = electorate_after(memory, head.round - 1)
    if electorate is None and not head.electorate.decides(head.signers):
        known = max(number for number in memory.committed if number < head.round)
        electorate = electorate_after(memory, known)
    if electorate is not None:
        require_quorum(head, electorate, operator_key)


def _check_place(head: Head, run: Run, memory: RunMemory, tokens: int) -> None:
    """Whether the round fits between those that are known: hashes, plan version, tokens of the run."""
    number, plan_version = head.round, head.manifest.round.plan_version
    before, after = memory.committed.get(number - 1), memory.committed.get(number + 1)
    if before is not None and head.manifest.previous_hash != before.manifest_hash:
        raise PeerMisbehaved(f"round {number} does not follow the round {number - 1} that we know")
    if after is not None and after.previous_hash not in (b"", head.hash):  # a base that nobody reported has none
        raise PeerMisbehaved(f"round {number + 1} that we know does not follow round {number}")
    newest = memory.committed[run.head_round].plan_version
    if (plan_version < newest) if number > run.head_round else (plan_version > newest > 0):
        raise PeerMisbehaved(f"round {number} is under plan {plan_version}, round {run.head_round} under {newest}")
    least, most = _total_tokens(number, run, memory, tokens)
    if not least <= head.committed_tokens <= min(most, _MAX):
        raise PeerMisbehaved(f"round {number} counts tokens that cannot be")


def _total_tokens(number: int, run: Run, memory: RunMemory, tokens: int) -> tuple[int, int]:
    """The least and the most that the run can have counted up to round `number`, in which `tokens` were trained."""
    before = memory.committed.get(number - 1)
    if before is not None:
        total = before.committed_tokens
        return (tokens, _MAX) if total is None else (total + tokens, total + tokens)
    if number <= run.head_round:
        known_total = number < run.head_round and memory.committed[run.head_round].committed_tokens is not None
        return tokens, run.committed_tokens if known_total else _MAX
    unknown = number - 1 - run.head_round  # nobody can have trained more in them than the plans allow
    most = unknown * max(sum(caps.values()) for caps in memory.caps.values())
    known = memory.committed[run.head_round].committed_tokens
    return run.committed_tokens + tokens, (_MAX if known is None else known + tokens + most)


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
