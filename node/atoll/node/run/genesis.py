"""Genesis (round 0): the chosen node draws the initial parameters and signs their digests; the others fetch them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from atoll.core import protocol
from atoll.core.clock import Clock, unix_ms
from atoll.core.data_position import DataPosition
from atoll.core.identity import Identity
from atoll.core.manifest import Head, sign_vote
from atoll.core.quorum import Ballot
from atoll.core.round_id import RoundId
from atoll.node.state.anchor import AnchorState
from atoll.node.trainer.trainer import Trainer
from atoll.v1 import manifest_pb2


async def write_genesis(
    trainer: Trainer, identity: Identity, run_id: str, run_dir: Path, clock: Clock
) -> tuple[Head, AnchorState]:
    """Initialise the model and sign round 0; return its head and the state of all layers.

    The state lies in the trainer's memory if the trainer holds all layers, else in an unlinked mapped file.
    """
    state = await _initial_state(trainer, run_dir)
    manifest = manifest_pb2.Manifest(
        protocol=protocol.ours(),
        round=RoundId(run_id, 0, 0, 0, 0).to_proto(),
        layers=await asyncio.to_thread(state.layer_states, 0),
        corpus_digest=bytes.fromhex(trainer.facts.corpus_digest),
        committed_unix_ms=unix_ms(clock),
        data=DataPosition(epoch_samples=trainer.facts.corpus_samples).to_proto(),
    )
    payload = manifest.SerializeToString(deterministic=True)
    signatures = [sign_vote(identity, payload, Ballot(0, 0))]
    return Head(manifest_pb2.CommittedManifest(payload=payload, signatures=signatures)), state


async def _initial_state(trainer: Trainer, run_dir: Path) -> AnchorState:
    offsets = trainer.facts.layer_offsets
    if trainer.facts.holds_all:
        await trainer.initialise()
        return AnchorState(trainer.anchor, offsets)
    path = run_dir / "genesis.f32"
    await trainer.write_initial_weights(path)
    initial = torch.from_file(str(path), size=offsets[-1], dtype=torch.float32)
    path.unlink()  # the mapping keeps its bytes
    return AnchorState(initial, offsets)
