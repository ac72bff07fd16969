"""Whether the report of a round can be true. Pure; what is cheap comes first, signatures last.

A manifest names its contributors, so it must never name those whose votes make it count: they stand in the manifest
before it. A round whose predecessor is unknown here (openers tell theirs in any order after an outage, and what an
opener told nobody died with it) is believed

- when it is what the known round after it follows, by its hash;
- when a strict majority of those who decide after the newest known round before it voted for it, and so did a strict
  majority of the present plan: no minority of either can lead the coordinator astray.

Otherwise it waits until the gap is filled (`reports.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from atoll.coordinator.sanitize import clean
from atoll.coordinator.state.snapshot import AttemptKey, RunMemory, State, electorate_after, is_void
from atoll.coordinator.store.records import Round, Run
from atoll.core.errors import PeerMisbehaved, SignatureInvalid
from atoll.core.fragments import fragment_count, fragment_of_round
from atoll.core.manifest import Head, parse_head, require_quorum, strip_unknown_manifest_fields
from atoll.core.quorum import Electorate
from atoll.core.round_id import RoundId
from atoll.core.verdicts import counted_tokens, require_valid_verdicts, screened_out
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2, plan_pb2
from atoll.v1 import membership_pb2 as mb

MAX_LAYERS = 4096
MAX_ROUNDS_AHEAD = 10_000  # rounds between the head and a committed one that is told before those between
MAX_ATTEMPT = 10**6  # weeks without a majority
MAX_PAYLOAD_BYTES = 2 << 20  # a manifest of thousands of members and layers
ABANDONED_WINDOW_ROUNDS = 256  # rounds below the head of which abandoned attempts are still kept
_MAX = 2**62  # databases keep 63 bits
_MAX_FLOPS_PER_TOKEN = 1e18  # of a layer, for one token
_DIGEST_BYTES = 32
_SIGNATURE_BYTES = 64


def report_key(report: mb.RoundReport) -> AttemptKey:
    """The attempt that a report is of."""
    return (report.round.number, report.round.plan_version, report.round.fragment, report.round.attempt)


def row_from_report(state: State, unix_ms: int, peer_id: str, run: Run, report: mb.RoundReport) -> Round:
    """The row of an attempt, as far as its opener's word goes. Raises `PeerMisbehaved` for what cannot be."""
    named, memory = report.round, state.memory[run.run_id]
    if named.run_id != run.run_id or peer_id not in memory.caps.get(named.plan_version, {}):
        raise PeerMisbehaved(f"round {named.number} under plan {named.plan_version} is not one this node was part of")
    ahead = (
        MAX_ROUNDS_AHEAD if report.committed else 2
    )  # who abandons a round knows the one before it, or is about to tell it
    if not 1 <= named.number <= run.head_round + ahead:
        raise PeerMisbehaved(f"round {named.number} is too far from round {run.head_round}, the newest known")
    if named.attempt > MAX_ATTEMPT or named.fragment != fragment_of_round(
        named.number, fragments_of(run, memory, named.plan_version)
    ):
        raise PeerMisbehaved(f"round {named.number} has an attempt or a fragment that cannot be")
    if not math.isfinite(report.seconds) or report.wire_bytes > _MAX:
        raise PeerMisbehaved(f"the report of round {named.number} holds a value that cannot be")
    if not report.committed:
        _check_abandoned(run, memory, peer_id, report)
    return Round(
        run_id=run.run_id,
        number=named.number,
        plan_version=named.plan_version,
        fragment=named.fragment,
        attempt=named.attempt,
        committed=report.committed,
        reason=clean(report.reason),
        opener=peer_id,
        seconds=max(0.0, report.seconds),
        reported_ms=unix_ms,
        wire_bytes=report.wire_bytes,
    )


def check_reported_head(state: State, run: Run, row: Round, report: mb.RoundReport) -> tuple[Head, Round]:
    """The manifest of a committed round and its row, if it fits what is known; nobody's signature is checked yet.

    Raises `PeerMisbehaved`, `ProtocolMismatch`, `SignatureInvalid`.
    """
    memory = state.memory[run.run_id]
    _check_size(report.manifest, state.operator_key)
    parse_head(report.manifest, run.run_id, max_signatures=len(state.nodes))  # before much of it is copied
    head = Head(strip_unknown_manifest_fields(report.manifest))
    made = head.manifest.round
    known = memory.committed.get(row.number)
    if known is not None and known.manifest_hash != head.hash:
        raise PeerMisbehaved(f"round {row.number} was committed before, with another manifest")
    odd = made.plan_version == row.plan_version and made.fragment != row.fragment
    if odd or made.number != row.number or head.ballot != (row.plan_version, row.attempt):
        raise PeerMisbehaved(f"the manifest is of round {head.round}, the report of another attempt or round")
    if is_void(memory.bases, row.number, made.plan_version):
        raise PeerMisbehaved(f"round {row.number} is void: the run was recovered from before it")
    if not head.signers <= state.nodes.keys():
        raise PeerMisbehaved(f"round {row.number} is signed by somebody who was never a member")
    check_layers(head.manifest, _layer_count(run.layers))
    if head.manifest.fragments != fragments_of(run, memory, made.plan_version):
        raise PeerMisbehaved(f"round {head.round} is of other fragments than those of its plan")
    tokens = _contributed_tokens(head, memory.caps.get(made.plan_version, {}))
    _check_history(head, run, memory, tokens)
    contributions = head.manifest.contributions
    return head, replace(
        row,
        tokens=tokens,
        committed_tokens=head.committed_tokens,
        members=len(contributions),
        parts_zeroed=head.manifest.parts_zeroed,
        manifest_hash=head.hash,
        manifest=head.committed.SerializeToString(),
        previous_hash=head.manifest.previous_hash,
        made_under=made.plan_version,
        present=tuple(sorted(head.electorate.members)),
        partial=sum(item.partial for item in contributions),
        screened=tuple(sorted(contributions[place].peer_id for place in screened_out(head.manifest))),
        codec=_codec_name(head.manifest.codec),
    )


def _codec_name(codec: pb.Codec) -> str:
    """Its name in run specs; a number where it is none that we know."""
    try:
        return pb.Codec.Name(codec).removeprefix("CODEC_").lower()
    except ValueError:
        return str(codec)


def fragments_of(run: Run, memory: RunMemory, plan_version: int) -> int:
    """Among how many fragments the run's rounds take turns under that plan."""
    return fragment_count(memory.spec.sync.fragments, _layer_count(run.layers), memory.cuts.get(plan_version, 0))


@lru_cache(maxsize=16)  # asked about every report of a run
def _layer_count(table: bytes) -> int:
    return len(plan_pb2.LayerTable.FromString(table).layers)


def is_decided(head: Head, memory: RunMemory, operator_key: bytes) -> bool:
    """Whether those who decide the round voted for it; False when nobody can tell yet. Takes signers at their word.

    Raises `SignatureInvalid` when the round before it is known and the votes are not enough.
    """
    known, after = memory.committed.get(head.round), memory.committed.get(head.round + 1)
    if known is not None or (after is not None and after.previous_hash == head.hash):
        return True  # known by its hash: `check_reported_head` compared them
    electorate = electorate_after(memory, head.round - 1)
    if electorate is not None:
        require_quorum(head, electorate, operator_key)
        return True
    newest = electorate_after(memory, max(number for number in memory.committed if number < head.round))
    planned = Electorate(frozenset(memory.plan.members if memory.plan else ()))
    return newest is not None and newest.decides(head.signers) and planned.decides(head.signers)


def check_layer_table(table: plan_pb2.LayerTable, model_hash: str) -> None:
    """Raise `PeerMisbehaved` unless the layers are few enough, have names, can be, and are of the run's model."""
    names = {layer.name for layer in table.layers}
    if not 1 <= len(table.layers) <= MAX_LAYERS or len(names) != len(table.layers) or "" in names:
        raise PeerMisbehaved(f"a layer table has 1 to {MAX_LAYERS} layers with names of their own")
    if any(not names.issuperset(layer.tied_to) for layer in table.layers):
        raise PeerMisbehaved("a layer table ties a layer to one that is not in it")
    if any(
        not 0 <= layer.flops_per_token_forward <= _MAX_FLOPS_PER_TOKEN for layer in table.layers
    ):  # false for NaN, too
        raise PeerMisbehaved("a layer table has figures that cannot be")
    if table.model_hash != model_hash:
        raise PeerMisbehaved("the layer table is of another model than the run's")


def check_layers(manifest: manifest_pb2.Manifest, count: int) -> None:
    """Raise `PeerMisbehaved` unless every layer is there, in order, with digests."""
    if [item.layer for item in manifest.layers] != list(range(count)):
        raise PeerMisbehaved(f"the manifest does not list the {count} layers in order")
    if any(len(item.anchor_digest) != _DIGEST_BYTES for item in manifest.layers) or any(
        len(item.momentum_digest) != _DIGEST_BYTES for item in manifest.layers
    ):
        raise PeerMisbehaved(f"a digest in the manifest is not {_DIGEST_BYTES} bytes long")


def _check_size(committed: manifest_pb2.CommittedManifest, operator_key: bytes) -> None:
    if len(committed.payload) > MAX_PAYLOAD_BYTES:
        raise PeerMisbehaved(f"a manifest has at most {MAX_PAYLOAD_BYTES} bytes")
    vote = committed.tie_break
    if committed.HasField("tie_break") and (vote.public_key != operator_key or len(vote.signature) != _SIGNATURE_BYTES):
        raise SignatureInvalid("the manifest carries a tie-break that is not the coordinator's")


def _check_abandoned(run: Run, memory: RunMemory, peer_id: str, report: mb.RoundReport) -> None:
    """Only its opener knows that an attempt was abandoned, and only of late ones it is worth a row."""
    named = report.round
    if named.number <= run.head_round - ABANDONED_WINDOW_ROUNDS:
        raise PeerMisbehaved(f"round {named.number} is long over; attempts at it are not kept any more")
    if is_void(memory.bases, named.number, named.plan_version):
        raise PeerMisbehaved(f"round {named.number} is void: the run was recovered from before it")
    if RoundId.from_proto(named).opener(memory.caps[named.plan_version]) != peer_id:
        raise PeerMisbehaved(f"attempt {named.attempt} at round {named.number} was not this node's to open")


def _contributed_tokens(head: Head, caps: Mapping[str, int]) -> int:
    """Tokens of a round to which members of its plan contributed, each once and within its cap."""
    contributions = head.manifest.contributions
    names = {item.peer_id for item in contributions}
    if not head.electorate.members or len(names) != len(contributions) or not names <= caps.keys():
        raise PeerMisbehaved(f"the contributors of round {head.round} are not members of its plan")
    require_valid_verdicts(head.manifest.verdicts, [item.weight for item in contributions], head.manifest.parts_total)
    for item, counted in zip(contributions, counted_tokens(head.manifest), strict=True):
        if item.weight > caps[item.peer_id] or item.tokens != counted:
            raise PeerMisbehaved(f"round {head.round} counts more tokens of {item.peer_id} than its plan allows")
    return sum(item.tokens for item in contributions)


def _check_history(head: Head, run: Run, memory: RunMemory, tokens: int) -> None:
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
