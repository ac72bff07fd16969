"""A run of a few dozen numbers: heads that are really signed, over states that are told apart by their round."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from atoll.core import protocol
from atoll.core.identity import Identity
from atoll.core.manifest import Head, sign_vote
from atoll.core.quorum import Ballot
from atoll.core.round_id import RoundId
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.export.stored_model import StoredModel, open_checkpoint
from atoll.node.state.checkpoint import CheckpointState, CheckpointStore
from atoll.node.state.outer_step import layer_states
from atoll.node.state.tensor_file import LayerLayout
from atoll.v1 import manifest_pb2

SPEC: RunSpec = parse_run_spec(
    'version = 1\n[run]\nname = "reef"\nstop_tokens = 1000\n[data]\npath = "corpus"\n[sync]\nround_tokens = 100\n'
)
LAYERS = LayerLayout(("embedding", "block.0", "head"), (0, 5, 12, 16))
ANN, BOB = Identity.generate(), Identity.generate()


def state_of(number: int, salt: float = 0.0, layers: LayerLayout = LAYERS, seconds: float = 0.0) -> CheckpointState:
    """The state of round `number`, committed `seconds` after 1970; another `salt`, another history."""
    anchor_E = torch.arange(layers.elements, dtype=torch.float32) + number + salt
    return of_vectors(number, anchor_E, -anchor_E, layers, seconds=seconds)


def of_vectors(
    number: int,
    anchor_E: torch.Tensor,
    momentum_E: torch.Tensor,
    layers: LayerLayout,
    run: str = "reef",
    seconds: float = 0.0,
) -> CheckpointState:
    manifest = manifest_pb2.Manifest(
        protocol=protocol.ours(),
        round=RoundId(run, 1, 0, number, 0).to_proto(),
        layers=layer_states(anchor_E, momentum_E, layers.offsets, number),
        committed_tokens=100 * number,
        committed_unix_ms=int(1000 * seconds),
    )
    payload = manifest.SerializeToString(deterministic=True)
    votes = [sign_vote(member, payload, Ballot(1, 0)) for member in (ANN, BOB)]
    committed = manifest_pb2.CommittedManifest(payload=payload, signatures=votes, ballot_plan_version=1)
    return CheckpointState(Head(committed), layers, anchor_E, momentum_E)


@contextmanager
def stored(spec: RunSpec, state: CheckpointState) -> Iterator[StoredModel]:
    """The state as a checkpoint on disk, while the block runs."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as held:
        yield open_checkpoint(CheckpointStore(Path(directory) / "it", spec, keep=1).write(state), held)
