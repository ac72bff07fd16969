"""Checks of reported rounds. Pure; cheap checks come first, signatures last.

A manifest cannot name its own valid voters. The previous manifest names them. So rounds are accepted in order
(`reports.py`), and the coordinator asks nodes for missing ones (`learner.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from atoll.coordinator.sanitize import clean
from atoll.coordinator.state.draft import KEPT_PLANS
from atoll.coordinator.state.run_memory import AttemptKey, RunMemory, electorate_after, epoch_of, is_void, seats_after
from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import MAX_INTEGER, SHA256_BYTES, Round, Run
from atoll.core.errors import PeerMisbehaved, SignatureInvalid
from atoll.core.fragments import fragment_count, fragment_of_round
from atoll.core.identity import peer_id_of
from atoll.core.manifest import Head, parse_head, require_quorum, strip_unknown_manifest_fields
from atoll.core.probation import keeps_to_limit
from atoll.core.quorum import MAX_SEATS
from atoll.core.round_id import RoundId
from atoll.core.verdicts import counted_tokens, partial_contributions, require_valid_verdicts, screened_out
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2, plan_pb2
from atoll.v1 import membership_pb2 as mb

MAX_LAYERS = 4096
MAX_LAYER_PARAMETERS = 1 << 33  # of one layer: 34 GB of fp32
MAX_ROUNDS_AHEAD = 10_000  # from the newest known round to a round that needs the coordinator's vote
MAX_ATTEMPT = 10**6  # enough for weeks without a majority
MAX_PAYLOAD_BYTES = 2 << 20  # enough for thousands of members and layers
ABANDONED_WINDOW_ROUNDS = 256  # older abandoned attempts are not stored
_MAX_FLOPS_PER_TOKEN = 1e18  # of one layer


def report_key(report: mb.RoundReport) -> AttemptKey:
    """Key of the reported attempt."""
    return (report.round.number, report.round.plan_version, report.round.fragment, report.round.attempt)


def row_from_report(state: State, unix_ms: int, peer_id: str, run: Run, report: mb.RoundReport) -> Round:
    """The row of an attempt from its opener's report, before the manifest is read. Raises `PeerMisbehaved`.

    `peer_id` is empty for an attempt under a forgotten plan: its opener is unknown.
    """
    named, memory = report.round, state.memory[run.run_id]
    members = (
        {"": 0} if is_forgotten(run, memory, named.plan_version) else memory.token_caps.get(named.plan_version, {})
    )
    if named.run_id != run.run_id or peer_id not in members:
        raise PeerMisbehaved(f"this node was not a member of round {named.number} under plan {named.plan_version}")
    if not 1 <= named.number <= MAX_INTEGER:
        raise PeerMisbehaved(f"the number of a round is {named.number}; must be 1 to {MAX_INTEGER}")
    if named.attempt > MAX_ATTEMPT:
        raise PeerMisbehaved(f"attempt of round {named.number} is {named.attempt}; must be at most {MAX_ATTEMPT}")
    fragment = fragment_of_round(named.number, fragments_of(run, memory, named.plan_version))
    if peer_id and named.fragment != fragment:
        raise PeerMisbehaved(f"fragment of round {named.number} is {named.fragment}; must be {fragment}")
    if not math.isfinite(report.seconds):
        raise PeerMisbehaved(f"seconds of round {named.number} is {report.seconds}; must be finite")
    if report.wire_bytes > MAX_INTEGER:
        raise PeerMisbehaved(f"wire_bytes of round {named.number} is {report.wire_bytes}; at most {MAX_INTEGER}")
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
    """The manifest of a committed round and its row, if they fit the known history. Verifies no signature yet.

    Raises `PeerMisbehaved`, `ProtocolMismatch`, `SignatureInvalid`.
    """
    memory = state.memory[run.run_id]
    check_size(report.manifest)
    parse_head(report.manifest, run.run_id, max_signatures=MAX_SEATS)  # checked before a large message is copied
    head = Head(strip_unknown_manifest_fields(report.manifest))
    made = head.manifest.round
    known = memory.committed.get(row.number)
    if known is not None and known.manifest_hash != head.hash:
        raise PeerMisbehaved(f"round {row.number} has committed before, with another manifest")
    other_fragment = made.plan_version == row.plan_version and made.fragment != row.fragment
    if other_fragment or made.number != row.number or head.ballot != (row.plan_version, row.attempt):
        raise PeerMisbehaved(f"the manifest is of round {head.round}, the report of another attempt or round")
    if is_void(memory.bases, row.number, made.plan_version):
        raise PeerMisbehaved(f"round {row.number} is void: the run was recovered from before it")
    if head.manifest.epoch != epoch_of(memory.bases, row.number):
        raise PeerMisbehaved(f"round {row.number} is of epoch {head.manifest.epoch}, which a recovery ended")
    if not head.signers <= state.nodes.keys() | {peer_id_of(state.operator_key)}:
        raise PeerMisbehaved(f"round {row.number} is signed by a peer that was never enrolled")
    check_layers(head.manifest, layer_count(run.layers))
    forgotten = is_forgotten(run, memory, made.plan_version)
    if not forgotten and head.manifest.fragments != fragments_of(run, memory, made.plan_version):
        raise PeerMisbehaved(f"round {head.round} has {head.manifest.fragments} fragments; its plan has another number")
    tokens = _contributed_tokens(head, None if forgotten else memory.token_caps.get(made.plan_version, {}))
    _check_probation(head, None if forgotten else memory.on_probation.get(made.plan_version, frozenset()))
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
        present=tuple(sorted(head.present)),
        seats=head.seats,
        partial=len(partial_contributions(head.manifest)),
        screened=tuple(sorted(contributions[place].peer_id for place in screened_out(head.manifest))),
        codec=_codec_name(head.manifest.codec),
    )


def _codec_name(codec: pb.Codec) -> str:
    """The codec's name in run specs; its number if this release does not know it."""
    try:
        return pb.Codec.Name(codec).removeprefix("CODEC_").lower()
    except ValueError:
        return str(codec)


def _check_probation(head: Head, on_probation: frozenset[str] | None) -> None:
    """Raise `PeerMisbehaved` unless contributors on probation are marked and their weight is within its limit.

    `on_probation` is None if the plan's content is unknown.
    """
    made = head.manifest.contributions
    named = {item.peer_id for item in made if item.on_probation}
    expected = {item.peer_id for item in made} & on_probation if on_probation is not None else named
    if named != expected or not keeps_to_limit(made):
        raise PeerMisbehaved(f"round {head.round} gives contributors on probation more weight than its plan allows")


def is_forgotten(run: Run, memory: RunMemory, plan_version: int) -> bool:
    """Whether a plan's content is unknown: it was issued long ago, or between a backup and its restore."""
    newest_forgotten = max(run.plan_floor, run.plan_version - KEPT_PLANS)
    return plan_version not in memory.token_caps and 0 < plan_version <= newest_forgotten


def fragments_of(run: Run, memory: RunMemory, plan_version: int) -> int:
    """Number of fragments of the run under plan `plan_version`."""
    return fragment_count(memory.spec.sync.fragments, layer_count(run.layers), memory.cut_counts.get(plan_version, 0))


@lru_cache(maxsize=16)  # needed for every report of a run
def layer_count(table: bytes) -> int:
    """Number of layers in a serialized layer table; 0 before genesis."""
    return len(plan_pb2.LayerTable.FromString(table).layers)


@lru_cache(maxsize=64)  # needed at every tick while a fork waits
def layer_shape(table: bytes) -> tuple[tuple[str, int], ...]:
    """Name and number of parameters of every layer in a serialized layer table."""
    return tuple((row.name, row.parameters) for row in plan_pb2.LayerTable.FromString(table).layers)


def check_votes(head: Head, memory: RunMemory, operator_key: bytes) -> None:
    """Raise `SignatureInvalid` unless the electorate that the previous round names voted for it. Verifies no signature.

    If a round's hash is known, its votes were counted before (`check_reported_head` compares the hashes).
    """
    if head.round in memory.committed:
        return
    electorate = electorate_after(memory, head.round - 1)
    if electorate is None:
        raise SignatureInvalid(f"round {head.round} cannot be checked: round {head.round - 1} is not known")
    require_quorum(head, electorate, operator_key)


def check_layer_table(table: plan_pb2.LayerTable, model_hash: str) -> None:
    """Raise `PeerMisbehaved` unless the layer table is well formed and belongs to the run's model."""
    names = {layer.name for layer in table.layers}
    if not 1 <= len(table.layers) <= MAX_LAYERS or len(names) != len(table.layers) or "" in names:
        raise PeerMisbehaved(
            f"the layer table has {len(table.layers)} layers with {len(names)} names; "
            f"must have 1 to {MAX_LAYERS} layers, each with its own name"
        )
    if any(not names.issuperset(layer.tied_to) for layer in table.layers):
        raise PeerMisbehaved("the layer table ties a layer to one that is not in it")
    for layer in table.layers:
        _check_layer(layer)
    if table.model_hash != model_hash:
        raise PeerMisbehaved("the layer table belongs to another model than the run's")


def _check_layer(layer: plan_pb2.LayerInfo) -> None:
    if layer.parameters > MAX_LAYER_PARAMETERS:
        has = f"layer {clean(layer.name, 64)} has {layer.parameters} parameters"
        raise PeerMisbehaved(f"{has}; must have at most {MAX_LAYER_PARAMETERS}")
    if not 0 <= layer.flops_per_token_forward <= _MAX_FLOPS_PER_TOKEN:  # also refuses NaN
        flops = f"flops_per_token_forward of layer {clean(layer.name, 64)} is {layer.flops_per_token_forward}"
        raise PeerMisbehaved(f"{flops}; must be 0 to {_MAX_FLOPS_PER_TOKEN:g}")


def check_layers(manifest: manifest_pb2.Manifest, count: int) -> None:
    """Raise `PeerMisbehaved` unless the manifest lists every layer, in order, with digests."""
    if [item.layer for item in manifest.layers] != list(range(count)):
        raise PeerMisbehaved(f"the manifest does not list the {count} layers in order")
    if any(len(item.anchor_digest) != SHA256_BYTES for item in manifest.layers) or any(
        len(item.momentum_digest) != SHA256_BYTES for item in manifest.layers
    ):
        raise PeerMisbehaved(f"a layer digest in the manifest does not have {SHA256_BYTES} bytes")


def check_size(committed: manifest_pb2.CommittedManifest) -> None:
    """Raise `PeerMisbehaved` for a manifest that is larger than any valid one."""
    if len(committed.payload) > MAX_PAYLOAD_BYTES:
        raise PeerMisbehaved(f"the manifest has {len(committed.payload)} bytes; must be at most {MAX_PAYLOAD_BYTES}")


def _check_abandoned(run: Run, memory: RunMemory, peer_id: str, report: mb.RoundReport) -> None:
    """Raise `PeerMisbehaved` unless the attempt is recent and this node was its opener.

    Others cannot know how it ended.
    """
    named = report.round
    if named.number <= run.head_round - ABANDONED_WINDOW_ROUNDS:
        raise PeerMisbehaved(
            f"round {named.number} is over {ABANDONED_WINDOW_ROUNDS} rounds old; its attempts are not stored any more"
        )
    if is_void(memory.bases, named.number, named.plan_version):
        raise PeerMisbehaved(f"round {named.number} is void: the run was recovered from before it")
    seats, caps = seats_after(memory, named.number - 1), memory.token_caps[named.plan_version]
    openers = [peer for peer in seats if peer in caps] if seats is not None else [peer_id]
    if RoundId.from_proto(named).opener(openers) != peer_id:
        raise PeerMisbehaved(f"this node is not the opener of attempt {named.attempt} at round {named.number}")


def _contributed_tokens(head: Head, caps: Mapping[str, int] | None) -> int:
    """Tokens of a round. Checks that only its plan's members contributed, each once and within its cap.

    `caps` is None if the plan's content is unknown. Then only the votes confirm members and tokens.
    """
    contributions = head.manifest.contributions
    names = {item.peer_id for item in contributions}
    if caps is None:
        caps = {item.peer_id: item.weight for item in contributions}
    if not head.present or not head.seats or len(names) != len(contributions) or not names <= caps.keys():
        raise PeerMisbehaved(f"round {head.round} has contributors outside its plan, or one contributor twice")
    require_valid_verdicts(head.manifest.verdicts, contributions, head.manifest.parts_total)
    for item, counted in zip(contributions, counted_tokens(head.manifest), strict=True):
        if item.weight > caps[item.peer_id] or item.tokens != counted:
            raise PeerMisbehaved(f"round {head.round} counts more tokens of {item.peer_id} than its plan allows")
    return sum(item.tokens for item in contributions)


def _check_history(head: Head, run: Run, memory: RunMemory, tokens: int) -> None:
    """Raise `PeerMisbehaved` unless hash, plan version and token total fit the known previous round."""
    number, plan_version = head.round, head.manifest.round.plan_version
    before, is_new = memory.committed.get(number - 1), number > run.head_round
    if before is not None and head.manifest.previous_hash != before.manifest_hash:
        raise PeerMisbehaved(f"round {number} does not follow the known round {number - 1}")
    if is_new and plan_version < (newest := memory.committed[run.head_round].plan_version):
        raise PeerMisbehaved(f"round {number} is under plan {plan_version}, round {run.head_round} under {newest}")
    exact = before is not None and before.committed_tokens is not None
    least = tokens + (before.committed_tokens or 0 if before is not None else run.committed_tokens if is_new else 0)
    most = least if exact else MAX_INTEGER
    if not least <= head.committed_tokens <= min(most, MAX_INTEGER):
        raise PeerMisbehaved(
            f"committed_tokens of round {number} is {head.committed_tokens}; must be {least} to {most}"
        )
