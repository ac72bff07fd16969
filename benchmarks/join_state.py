"""What benchmarks of joining fetch: random anchor and momentum in two files, and manifests that vouch for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from atoll.core import protocol
from atoll.core.identity import Identity
from atoll.core.manifest import Head, sign_vote
from atoll.core.plan import Assignment, Base, Plan
from atoll.core.quorum import COORDINATOR, Ballot, next_seats
from atoll.core.round_id import RoundId
from atoll.node.state.anchor import AnchorState
from atoll.v1 import manifest_pb2

RUN = "join"
BLOCKS = 12


def offsets_of(elements: int) -> tuple[int, ...]:
    """An embedding and a head of a sixth each, and equal blocks."""
    sixth = elements // 6
    block = (elements - 2 * sixth) // BLOCKS
    return (0, *(sixth + number * block for number in range(BLOCKS)), elements - sixth, elements)


def make_state(path: Path, elements: int, seed: int) -> AnchorState:
    """Random anchor and momentum, kept in two files that donors map."""
    generator = torch.Generator().manual_seed(seed)
    for name in ("anchor", "momentum"):
        torch.randn(elements, generator=generator).numpy().tofile(f"{path}.{name}")
    return mapped(path)


def mapped(path: Path) -> AnchorState:
    """What `make_state` left in those files."""
    elements = Path(f"{path}.anchor").stat().st_size // 4
    vectors = [torch.from_file(f"{path}.{name}", shared=False, size=elements) for name in ("anchor", "momentum")]
    state = AnchorState(vectors[0], offsets_of(elements))
    state.momentum_E = vectors[1]
    return state


def commit(state: AnchorState, number: int, previous: bytes, voters: Sequence[Identity]) -> Head:
    """The round that made this state, with their votes."""
    place = {voter.peer_id: index for index, voter in enumerate(voters)}
    seats = next_seats(place, place.keys(), ())
    manifest = manifest_pb2.Manifest(
        protocol=protocol.ours(),
        round=RoundId(RUN, 1, 0, number, 0).to_proto(),
        previous_hash=previous,
        contributions=[manifest_pb2.Contribution(peer_id=voter.peer_id, present=True) for voter in voters],
        layers=state.layer_states(number),
        seats=[place[peer] for peer in seats if peer in place],
        coordinator_seat=COORDINATOR in seats,
        epoch=1,
    )
    payload = manifest.SerializeToString()
    votes = [sign_vote(voter, payload, Ballot(1, 0)) for voter in voters]
    return Head(manifest_pb2.CommittedManifest(payload=payload, signatures=votes, ballot_plan_version=1))


def plan_of(peers: Sequence[str], voters: Sequence[str], genesis_hash: bytes, layers: int) -> Plan:
    """A plan with these members; `voters` decided its first round."""
    members = sorted(peers)
    return Plan(
        RUN,
        1,
        tuple(Assignment(peer, 0, layers - 1, (), 1, 1) for peer in members),
        tuple((peer,) for peer in members),
        Base(genesis_hash, next_seats(sorted(voters), voters, ())),
    )


def write_head(path: Path, head: Head) -> None:
    """For other processes."""
    path.write_bytes(head.committed.SerializeToString())


def read_head(path: Path) -> Head:
    """What `write_head` wrote."""
    return Head(manifest_pb2.CommittedManifest.FromString(path.read_bytes()))
