"""Genesis (round 0): the chosen node creates the initial parameters and signs their digests; the others fetch them.

In a fork, the parameters come from a checkpoint of another run on its disk. Momentum, optimiser and data start again.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from atoll.core import protocol
from atoll.core.built_in_shape import FP32_BYTES
from atoll.core.clock import Clock, unix_ms
from atoll.core.data_position import DataPosition
from atoll.core.files import data_dir_unusable
from atoll.core.identity import Identity
from atoll.core.manifest import Head, sign_vote
from atoll.core.quorum import Ballot
from atoll.core.round_id import RoundId
from atoll.core.run_spec import ForkSection, RunSpec
from atoll.node.state.anchor import AnchorState
from atoll.node.state.fork_anchor import Refusal, read_fork_anchor, resources_refusal
from atoll.node.state.tensor_file import LayerLayout
from atoll.node.trainer.trainer import Trainer
from atoll.v1 import manifest_pb2

GENESIS_ANCHOR, GENESIS_MOMENTUM = "genesis.f32", "genesis-momentum.f32"  # removed from the directory at once


@dataclass(frozen=True)
class Genesis:
    """Round 0 with the state of all layers."""

    head: Head
    state: AnchorState  # in the trainer's memory if the trainer holds all layers
    source_manifest: bytes  # manifest payload of the round with which a fork begins; empty: new weights


async def write_genesis(
    trainer: Trainer, identity: Identity, spec: RunSpec, run_dir: Path, clock: Clock
) -> Genesis | Refusal:
    """Initialise the model and sign round 0. In a fork, return a refusal if its source is not usable here."""
    begun = await _begin(trainer, spec, run_dir)
    if isinstance(begun, Refusal):
        return begun
    state, source_manifest = begun
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
    return Genesis(head, state, source_manifest)


async def _begin(trainer: Trainer, spec: RunSpec, run_dir: Path) -> tuple[AnchorState, bytes] | Refusal:
    """The state of round 0. In a fork, also the manifest of its source."""
    if spec.fork is None:
        return await _initial_state(trainer, run_dir), b""
    return await asyncio.to_thread(_state_of_source, trainer, spec.fork, run_dir)


def _state_of_source(trainer: Trainer, fork: ForkSection, run_dir: Path) -> tuple[AnchorState, bytes] | Refusal:
    facts = trainer.facts

    def allocate() -> Tensor:
        return trainer.anchor if facts.holds_all else _mapped_vector(run_dir / GENESIS_ANCHOR, facts.elements)

    source = read_fork_anchor(run_dir.parent, fork, LayerLayout.of(facts.layers), allocate)
    if isinstance(source, Refusal):
        return source
    try:
        return _state(trainer, run_dir, source.anchor_E), source.manifest
    except (OSError, MemoryError, RuntimeError) as error:  # torch raises RuntimeError if memory is short
        return resources_refusal(error, run_dir.parent)


async def _initial_state(trainer: Trainer, run_dir: Path) -> AnchorState:
    """Create new weights. They are in an unlinked mapped file if the trainer does not hold all layers."""
    facts = trainer.facts
    if facts.holds_all:
        await trainer.initialise()
        return await asyncio.to_thread(_state, trainer, run_dir, trainer.anchor)
    path = run_dir / GENESIS_ANCHOR
    await trainer.write_initial_weights(path)
    try:
        initial = torch.from_file(str(path), size=facts.elements, dtype=torch.float32)
        path.unlink()  # the mapping keeps its bytes
        return await asyncio.to_thread(_state, trainer, run_dir, initial)
    except OSError as error:
        raise data_dir_unusable(run_dir, error) from error


def _state(trainer: Trainer, run_dir: Path, anchor: Tensor) -> AnchorState:
    """The state with these weights. If the trainer does not hold all layers, the momentum takes no memory."""
    facts = trainer.facts
    momentum = None if facts.holds_all else _mapped_zeros(run_dir / GENESIS_MOMENTUM, facts.elements)
    return AnchorState(anchor, facts.layer_offsets, momentum_E=momentum)


def _mapped_vector(path: Path, elements: int) -> Tensor:
    """Create a vector, fp32 [`elements`], on disk instead of in memory. Raises `OSError` if there is no space."""
    with path.open("wb") as file:
        path.unlink()  # the mapping keeps its bytes
        os.posix_fallocate(file.fileno(), 0, FP32_BYTES * elements)  # otherwise a full disk would end the process later
        return torch.from_file(_name_of(file), shared=True, size=elements, dtype=torch.float32)


def _mapped_zeros(path: Path, elements: int) -> Tensor:
    """fp32 zeros [`elements`] that take no memory and no disk while nothing is written to them. Raises `OSError`."""
    with path.open("wb") as file:
        path.unlink()
        file.truncate(FP32_BYTES * elements)
        return torch.from_file(_name_of(file), size=elements, dtype=torch.float32)


def _name_of(file: BinaryIO) -> str:
    return f"/proc/self/fd/{file.fileno()}"
