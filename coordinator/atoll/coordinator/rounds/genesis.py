"""The genesis that the chosen node reports: check it, store it, and issue plan 1. Pure.

Its outer momentum is zero in all layers, in a fork too: every run starts without momentum.

The genesis of a fork must have the weights of its source. The spec names the source round's manifest by its hash; the
node sends that manifest, and it has the digest of every layer. So the writer cannot put other weights in their place.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from google.protobuf.message import DecodeError

from atoll.coordinator.live import plan_upkeep
from atoll.coordinator.rounds.reports import reject
from atoll.coordinator.rounds.round_checks import MAX_PAYLOAD_BYTES, check_layer_table, check_layers, layer_shape
from atoll.coordinator.rounds.zero_digests import ZeroDigests
from atoll.coordinator.sanitize import clean
from atoll.coordinator.state.draft import Draft, charge_row
from atoll.coordinator.state.known_nodes import known_nodes
from atoll.coordinator.state.run_memory import Commit
from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import Run
from atoll.core.data_position import DataPosition
from atoll.core.errors import AtollError, PeerMisbehaved
from atoll.core.manifest import manifest_hash, parse_and_verify_head, require_signers, strip_unknown_manifest_fields
from atoll.core.run_spec import ForkSection, parse_run_spec
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

_REFUSALS = {
    mb.FORK_REFUSAL_MISSING: "it lacks the checkpoint",
    mb.FORK_REFUSAL_DAMAGED: "its checkpoint is damaged",
    mb.FORK_REFUSAL_OTHER_MANIFEST: "its checkpoint has another manifest",
    mb.FORK_REFUSAL_SOME_LAYERS: "its checkpoint lacks layers",
    mb.FORK_REFUSAL_RESOURCES: "it cannot read its checkpoint now",
    mb.FORK_REFUSAL_OTHER_LAYERS: "its model has other layers",
}


def apply_genesis_report(draft: Draft, peer_id: str, run_id: str, report: mb.GenesisReport, zeros: ZeroDigests) -> None:
    """Check and store the genesis manifest, and issue plan 1. Ignores nodes other than the chosen writer.

    `zeros` has the digests for the sizes of the report's layers.
    """
    run, memory = draft.state.runs[run_id], draft.state.memory[run_id]
    if (
        run.state != "GENESIS"
        or run.genesis
        or memory.genesis_writer != peer_id
        or peer_id in memory.failed_genesis_writers
        or not known_nodes(draft.state, [peer_id])  # the next tick asks another node
    ):
        return
    if report.refusal:
        _take_refusal(draft, peer_id, run_id, report)
        return
    try:
        _check_genesis(draft.state, run, peer_id, report, zeros)
    except AtollError as error:
        draft.remember(run_id, failed_genesis_writers=memory.failed_genesis_writers | {peer_id})
        reject(draft, run_id, peer_id, "genesis", error)
        return
    report.layers.DiscardUnknownFields()
    table, manifest = (
        report.layers.SerializeToString(),
        strip_unknown_manifest_fields(report.manifest).SerializeToString(),
    )
    draft.put(replace(run, layers=table, genesis=manifest))
    genesis = Commit(manifest_hash(report.manifest.payload))
    draft.remember(run_id, committed={**memory.committed, 0: genesis}, head_known_since=draft.now.monotonic)
    draft.event("run.genesis-written", run_id, peer_id, f"genesis has {len(report.layers.layers)} layers")
    plan_upkeep.issue_first_plan(draft, run_id)


def _take_refusal(draft: Draft, peer_id: str, run_id: str, report: mb.GenesisReport) -> None:
    """Note that the chosen node cannot write the genesis of a fork; the next tick asks another one."""
    memory = draft.state.memory[run_id]
    why = f"{_REFUSALS.get(report.refusal, 'it gave no reason')}: {clean(report.refusal_detail, 300)}"
    said = f"{draft.state.nodes[peer_id].name} cannot write genesis: {why}"
    failed = memory.failed_genesis_writers | {peer_id}
    draft.remember(run_id, failed_genesis_writers=failed, no_plan_reason=said)
    if charge_row(draft, peer_id):
        draft.event("genesis.refused", run_id, peer_id, said)


def _check_genesis(state: State, run: Run, writer: str, report: mb.GenesisReport, zeros: ZeroDigests) -> None:
    check_layer_table(report.layers, parse_run_spec(run.spec_toml).model_hash())
    if len(report.manifest.signatures) != 1:
        raise PeerMisbehaved(f"genesis has {len(report.manifest.signatures)} signatures; must have its writer's only")
    head = parse_and_verify_head(report.manifest, run.run_id)
    if head.round != 0 or head.manifest.previous_hash or head.manifest.contributions:
        raise PeerMisbehaved("genesis must be round 0, without a previous hash and without contributions")
    if head.manifest.corpus_digest.hex() != run.corpus_digest:
        raise PeerMisbehaved("genesis was written from another corpus than the run's")
    if head.data != DataPosition(epoch_samples=head.data.epoch_samples) or head.committed_tokens:
        raise PeerMisbehaved("genesis assigns data or counts tokens; plan 1 assigns the first data")
    check_layers(head.manifest, len(report.layers.layers))
    for row, item in zip(report.layers.layers, head.manifest.layers, strict=True):
        if item.momentum_digest != zeros.get(row.parameters):
            raise PeerMisbehaved(f"genesis has momentum in layer {clean(row.name, 64)}; it must be zero")
    _check_source(state, run.run_id, report, head.manifest)
    require_signers(head, [writer])


def _source_manifest(fork: ForkSection, payload: bytes) -> manifest_pb2.Manifest:
    if len(payload) > MAX_PAYLOAD_BYTES or hashlib.sha256(payload).hexdigest() != fork.manifest:
        raise PeerMisbehaved(f"genesis came without the manifest of round {fork.round} of run {fork.run}")
    try:
        source = manifest_pb2.Manifest.FromString(payload)
    except DecodeError as error:
        raise PeerMisbehaved(f"the hash in the spec is not that of a manifest: {error}") from error
    if (source.round.run_id, source.round.number) != (fork.run, fork.round):
        raise PeerMisbehaved(f"the manifest in the spec is of round {source.round.number} of run {source.round.run_id}")
    return source


def _check_source(state: State, run_id: str, report: mb.GenesisReport, genesis: manifest_pb2.Manifest) -> None:
    """Raise `PeerMisbehaved` unless the genesis of a fork has bit for bit the weights of its source."""
    fork = state.memory[run_id].spec.fork
    if fork is None:
        return
    source = _source_manifest(fork, report.source_manifest)
    if [item.anchor_digest for item in source.layers] != [item.anchor_digest for item in genesis.layers]:
        raise PeerMisbehaved(f"genesis has other weights than round {fork.round} of run {fork.run}")
    known = state.runs.get(fork.run)
    if known is None or not known.genesis:
        return
    if layer_shape(known.layers) != layer_shape(report.layers.SerializeToString()):
        raise PeerMisbehaved(f"genesis has other layers than run {fork.run}")
