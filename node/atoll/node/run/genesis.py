"""Genesis (round 0): the chosen node draws the initial parameters and signs their digests; the others fetch them.

Of a fork it takes them from a checkpoint of another run on its disk. Momentum, optimizer and data begin anew.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import torch

from atoll.core import protocol
from atoll.core.clock import Clock, unix_ms
from atoll.core.data_position import DataPosition
from atoll.core.identity import Identity
from atoll.core.manifest import Head, sign_vote
from atoll.core.quorum import Ballot
from atoll.core.round_id import RoundId
from atoll.core.run_spec import RunSpec
from atoll.node.state.anchor import AnchorState
from atoll.node.state.fork_anchor import ForkAnchor, Refusal, read_fork_anchor
from atoll.node.state.tensor_file import LayerLayout
from atoll.node.trainer.trainer import Trainer
from atoll.v1 import manifest_pb2


@dataclass(frozen=True)
class Genesis:
    """Round 0, and the state of all layers."""

    head: Head
    state: AnchorState  # in the trainer's memory if the trainer holds all layers
    source_manifest: bytes  # payload, of the round with which a fork begins; empty: new weights


async def write_genesis(
    trainer: Trainer, identity: Identity, spec: RunSpec, run_dir: Path, clock: Clock
) -> Genesis | Refusal:
    """Initialise the model and sign round 0; of a fork, say why not if its source is not here."""
    source: ForkAnchor | None = None
    if spec.fork is not None:
        layers = LayerLayout.of(trainer.facts.layers)
        found = await asyncio.to_thread(read_fork_anchor, run_dir.parent, spec.fork, layers)
        if isinstance(found, Refusal):
            return found
        source = found
    state = await (_initial_state(trainer, run_dir) if source is None else _state_of_source(trainer, source))
    manifest = manifest_pb2.Manifest(
        protocol=protocol.ours(),
        round=RoundId(spec.run.name, 0, 0, 0, 0).to_proto(),
        layers=await asyncio.to_thread(state.layer_states, 0),
        corpus_digest=bytes.fromhex(trainer.facts.corpus_digest),
        committed_unix_ms=unix_ms(clock),
        data=DataPosition(epoch_samples=trainer.facts.corpus_samples).to_proto(),
    )
    payload = manifest.SerializeToString(deterministic=True)
    signatures = [sign_vote(identity, payload, Ballot(0, 0))]
    head = Head(manifest_pb2.CommittedManifest(payload=payload, signatures=signatures))
    return Genesis(head, state, source.manifest if source is not None else b"")


async def _state_of_source(trainer: Trainer, source: ForkAnchor) -> AnchorState:
    offsets = trainer.facts.layer_offsets
    if not trainer.facts.holds_all:
        return AnchorState(source.anchor_E, offsets)
    await asyncio.to_thread(trainer.anchor.copy_, source.anchor_E)
    return AnchorState(trainer.anchor, offsets)


async def _initial_state(trainer: Trainer, run_dir: Path) -> AnchorState:
    """Draw new weights. They lie in an unlinked mapped file if the trainer does not hold all layers."""
    offsets = trainer.facts.layer_offsets
    if trainer.facts.holds_all:
        await trainer.initialise()
        return AnchorState(trainer.anchor, offsets)
    path = run_dir / "genesis.f32"
    await trainer.write_initial_weights(path)
    initial = torch.from_file(str(path), size=offsets[-1], dtype=torch.float32)
    path.unlink()  # the mapping keeps its bytes
    return AnchorState(initial, offsets)
