"""Whatever a peer writes to `/atoll/state/1`, asking or answering: a typed error at worst, in time."""

import asyncio
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.donors import ANN, CLEO, EVE, GENESIS, OPERATOR, QUICK, DonorSwarm, commit, history, plan_of, state_of
from support.virtual_time import run_virtually

from atoll.core.errors import AtollError
from atoll.core.frames import FrameKind
from atoll.node.state.catchup import catch_up
from atoll.node.state.state_client import PROTOCOL
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

STATE = state_of(3.0)
HEAD = commit(STATE, 1, [ANN], after=GENESIS)
KINDS = st.sampled_from(FrameKind)
NUMBERS = st.one_of(st.integers(0, 200), st.integers(0, 2**64 - 1))
HASHES = st.one_of(st.just(HEAD.hash), st.binary(max_size=40))
SLICES = st.builds(dp.StateSlice, manifest_hash=HASHES, start=NUMBERS, end=NUMBERS)
RUNS = st.sampled_from(["r", "", "another", "\n" * 100])
REQUESTS = st.one_of(
    st.builds(dp.StateRequest, run_id=RUNS, manifest_round=NUMBERS),
    st.builds(dp.StateRequest, run_id=RUNS, head_manifest=st.booleans()),
    st.builds(dp.StateRequest, run_id=RUNS, anchor=SLICES),
    st.builds(dp.StateRequest, run_id=RUNS, momentum=SLICES),
).map(dp.StateRequest.SerializeToString)

SIGNATURES = st.builds(pb.Signed, payload=st.binary(max_size=8), signature=st.binary(max_size=70), public_key=HASHES)
PAYLOADS = st.one_of(
    st.binary(max_size=60),
    st.builds(
        manifest_pb2.Manifest,
        protocol=st.just(HEAD.manifest.protocol),
        round=st.builds(pb.RoundId, run_id=RUNS, number=NUMBERS),
        previous_hash=st.one_of(st.just(GENESIS.hash), st.binary(max_size=32)),
        layers=st.lists(st.builds(manifest_pb2.LayerState, layer=st.integers(0, 5)), max_size=5),
    ).map(manifest_pb2.Manifest.SerializeToString),
    st.just(HEAD.committed.payload),
)
MANIFESTS = st.one_of(
    st.just(HEAD.committed),
    st.builds(
        manifest_pb2.CommittedManifest,
        payload=PAYLOADS,
        signatures=st.lists(SIGNATURES, max_size=3),
        ballot_plan_version=NUMBERS,
    ),
)
REPLIES = st.one_of(
    st.builds(dp.StateReply, manifest=MANIFESTS),
    st.builds(dp.StateReply, body_bytes=NUMBERS),
    st.just(dp.StateReply()),
).map(dp.StateReply.SerializeToString)


def frames(headers):
    return st.lists(
        st.tuples(KINDS, st.one_of(headers, headers, st.binary(max_size=50)), st.binary(max_size=80)), max_size=8
    )


CASES = [pytest.param(100, id="short"), pytest.param(10_000, id="soak", marks=pytest.mark.soak)]


@pytest.mark.parametrize("examples", CASES)
def test_whatever_is_asked(examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(frames(REQUESTS))
    def ask(questions):
        async def once(directory: Path) -> None:
            donor_swarm = DonorSwarm(directory)
            donor_swarm.serve(ANN, history(HEAD), STATE)
            donor = donor_swarm.networks[ANN.peer_id]
            stream = await donor_swarm.network.open(ANN.peer_id, PROTOCOL, timedelta(seconds=1))
            try:
                for kind, header, body in questions:
                    await stream.send(kind, header, body)
                    assert len((await stream.receive(timedelta(seconds=2))).body) <= 4 * 164
            except AtollError:
                pass
            await stream.close()
            while donor.tasks:
                await asyncio.wait(donor.tasks, timeout=2)
            assert donor.crashes == 0
            await donor_swarm.hub.close()

        with tempfile.TemporaryDirectory() as directory:
            run_virtually(once(Path(directory)))

    ask()


@pytest.mark.parametrize("examples", CASES)
def test_whatever_is_answered(examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(frames(REPLIES))
    def answer(answers):
        async def once() -> None:
            with tempfile.TemporaryDirectory() as directory:
                donor_swarm = DonorSwarm(Path(directory))
            left = list(answers)

            async def reply(stream):
                while left:
                    await stream.receive(timedelta(seconds=1))
                    await stream.send(*left.pop(0))

            donor_swarm.hub.join(EVE.peer_id).handle(PROTOCOL, reply)
            started = asyncio.get_running_loop().time()
            try:
                await catch_up(
                    donor_swarm.network,
                    plan_of(EVE, CLEO, seats=(ANN,)),
                    state_of(0.0),
                    None,
                    operator_key=OPERATOR.public_key,
                    policy=QUICK,
                )
                raise AssertionError("nothing of this was the state")
            except AtollError:
                pass
            assert asyncio.get_running_loop().time() - started < 5
            await donor_swarm.hub.close()

        run_virtually(once())

    answer()
