"""Catch-up believes signatures of the plan's members and digests, never a claim."""

from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
from support.machine_world import make_plan

from atoll.core import protocol
from atoll.core.errors import AtollError, PeerMisbehaved, Unreachable
from atoll.core.frames import FrameKind
from atoll.core.identity import Identity
from atoll.core.manifest import Head, sign_manifest
from atoll.core.plan import Plan
from atoll.core.round_id import RoundId
from atoll.node.state.anchor import AnchorState
from atoll.node.state.catchup import PROTOCOL, StateServer, catch_up, find_manifest, newest_round
from atoll.node.state.manifests import ManifestStore
from atoll.node.transport_memory import MemoryHub
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

OFFSETS = (0, 40, 100)
ANN, BOB, CLEO, EVE = (Identity.generate() for _ in range(4))


def state_of(value: float) -> AnchorState:
    state = AnchorState(torch.full((100,), value), OFFSETS)
    state.momentum_E.fill_(value / 2)
    return state


def head_of(state: AnchorState, number: int, signers: list[Identity], *, named=None, plan_version: int = 1) -> Head:
    members = named if named is not None else signers
    manifest = manifest_pb2.Manifest(
        protocol=protocol.ours(),
        round=RoundId("r", plan_version, 0, number, 0).to_proto(),
        contributions=[manifest_pb2.Contribution(peer_id=member.peer_id) for member in members],
        layers=state.layer_states(number),
    )
    payload = manifest.SerializeToString()
    signatures = [sign_manifest(signer, payload) for signer in signers]
    return Head(manifest_pb2.CommittedManifest(payload=payload, signatures=signatures))


@dataclass
class Reef:
    """Members that serve what they are given; we are cleo."""

    directory: object
    hub: MemoryHub = field(default_factory=MemoryHub)

    def __post_init__(self) -> None:
        self.us = self.hub.join(CLEO.peer_id)

    def serve(self, member: Identity, head: Head | None, state: AnchorState) -> None:
        store = ManifestStore(self.directory / member.peer_id, "r")
        if head is not None:
            store.append(head)
        network = self.hub.join(member.peer_id)
        StateServer(network, "r", store, lambda: (head, state) if head is not None else None)


@pytest.fixture
async def reef(tmp_path):
    made = Reef(tmp_path)
    yield made
    await made.hub.close()


def plan_of(*members: Identity, version: int = 2) -> Plan:
    return make_plan([member.peer_id for member in members], version)


async def test_a_newcomer_fetches_what_the_members_signed(reef):
    state = state_of(3.0)
    head = head_of(state, 5, [ANN, BOB])
    for member in (ANN, BOB):
        reef.serve(member, head, state)
    ours = state_of(0.0)
    fetched = await catch_up(reef.us, plan_of(ANN, BOB, CLEO), ours, None)
    assert fetched.head.hash == head.hash
    ours.adopt(fetched)
    assert ours.layer_states(5) == state.layer_states(5)
    assert await catch_up(reef.us, plan_of(ANN, BOB, CLEO), ours, fetched.head) is None


@pytest.mark.parametrize(
    "forge",
    [
        lambda state: head_of(state, 10**6, []),
        lambda state: head_of(state, 10**6, [EVE]),
        lambda state: head_of(state, 10**6, [EVE], named=[]),
        lambda state: head_of(state, 10**6, [EVE], named=[ANN, EVE]),
    ],
    ids=["nobody signed", "only the liar", "names nobody", "names others"],
)
async def test_a_forged_head_with_a_higher_round_is_not_believed(reef, forge):
    state, poison = state_of(3.0), state_of(666.0)
    head = head_of(state, 5, [ANN, EVE])
    reef.serve(ANN, head, state)
    reef.serve(EVE, forge(poison), poison)
    fetched = await catch_up(reef.us, plan_of(ANN, EVE, CLEO), state_of(0.0), None)
    assert fetched.head.hash == head.hash


async def test_under_this_very_plan_all_members_must_have_signed(reef):
    state = state_of(3.0)
    reef.serve(ANN, head_of(state, 9, [ANN], plan_version=2), state)
    reef.serve(BOB, None, state)
    with pytest.raises(Unreachable):
        await catch_up(reef.us, plan_of(ANN, BOB, CLEO), state_of(0.0), None)


async def test_one_reachable_member_of_many_is_not_enough(reef):
    state = state_of(3.0)
    reef.serve(EVE, head_of(state, 9, [EVE]), state)
    with pytest.raises(Unreachable):
        await catch_up(reef.us, plan_of(ANN, BOB, EVE, CLEO), state_of(0.0), None)


async def test_wrong_bytes_cost_a_retry_with_the_next_donor(reef):
    state = state_of(3.0)
    head = head_of(state, 5, [ANN, BOB])
    first, second = sorted((ANN, BOB), key=lambda member: member.peer_id)
    reef.serve(first, head, state_of(666.0))
    reef.serve(second, head, state)
    fetched = await catch_up(reef.us, plan_of(ANN, BOB, CLEO), state_of(0.0), None)
    assert torch.equal(fetched.anchor_E, state.anchor_E)


async def test_a_forged_layer_list_is_an_error_of_ours_not_a_crash(reef):
    state = state_of(3.0)
    odd = AnchorState(torch.full((100,), 3.0), (0, 10, 20, 100))
    head = head_of(odd, 5, [ANN, BOB])
    for member in (ANN, BOB):
        reef.serve(member, head, state)
    with pytest.raises(AtollError):
        await catch_up(reef.us, plan_of(ANN, BOB, CLEO), state_of(0.0), None)


async def test_another_manifest_at_our_own_round_is_taken_over(reef):
    state = state_of(3.0)
    head = head_of(state, 5, [ANN, BOB])
    for member in (ANN, BOB):
        reef.serve(member, head, state)
    private = head_of(state_of(7.0), 5, [CLEO])
    assert (await catch_up(reef.us, plan_of(ANN, BOB, CLEO), state_of(7.0), private)).head.hash == head.hash
    assert await newest_round(reef.us, plan_of(ANN, BOB, CLEO), private) == 5


async def test_a_round_in_doubt_is_decided_only_by_all_its_signatures(reef):
    state = state_of(3.0)
    partial, whole = head_of(state, 5, [ANN], named=[ANN, BOB, CLEO]), head_of(state, 5, [ANN, BOB, CLEO])
    reef.serve(ANN, partial, state)
    reef.serve(BOB, None, state)
    peers = [member.peer_id for member in (ANN, BOB, CLEO)]
    round_id = RoundId("r", 1, 0, 5, 0)
    assert await find_manifest(reef.us, peers, "r", round_id) is None
    reef.serve(BOB, whole, state)
    assert (await find_manifest(reef.us, peers, "r", round_id)).hash == whole.hash


async def test_one_question_at_a_time_and_none_outside_the_vector(reef):
    state = state_of(3.0)
    reef.serve(ANN, head_of(state, 5, [ANN]), state)

    async def ask(start: int, end: int):
        stream = await reef.us.open(ANN.peer_id, PROTOCOL, timedelta(seconds=2))
        piece = dp.StateSlice(round=5, start=start, end=end)
        await stream.send(FrameKind.MESSAGE, dp.StateRequest(run_id="r", anchor=piece).SerializeToString())
        return stream, await stream.receive(timedelta(seconds=2))

    with pytest.raises(PeerMisbehaved):
        await ask(50, 101)
    first, _ = await ask(0, 100)
    with pytest.raises(PeerMisbehaved):
        await ask(0, 100)
    await first.close()
