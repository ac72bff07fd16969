"""One donor of four answers with whatever it likes, made from true answers: joining ends with the true state."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import structlog
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.donors import (
    ANN,
    BOB,
    CLEO,
    DAN,
    EVE,
    GENESIS,
    OPERATOR,
    QUICK,
    DonorSwarm,
    commit,
    history,
    plan_of,
    state_of,
)
from support.memory_network import FrameInTransit, MemoryHub
from support.mutation import CASES, Mutator, cases, seeds

from atoll.core.errors import AtollError
from atoll.core.frames import Frame, FrameKind
from atoll.node.state.catchup import catch_up
from atoll.v1 import dataplane_pb2 as dp

STATE = state_of(3.0)
VOTERS = [ANN, BOB, DAN, EVE]
HEAD = commit(STATE, 1, VOTERS, after=GENESIS)
POLICY = replace(QUICK, answer_timeout=timedelta(seconds=5))  # honest donors may be slow on a busy machine


@pytest.mark.parametrize("examples", CASES)
def test_whatever_one_donor_answers(examples: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        donor_swarm = DonorSwarm(Path(directory))
        for voter in VOTERS:
            donor_swarm.serve(voter, history(HEAD), STATE)

        @cases(examples)
        @given(seeds, st.sampled_from([0.1, 0.5, 1.0]))
        def join(seed: int, often: float) -> None:
            mutator = Mutator(seed)

            async def change(passage: FrameInTransit) -> Frame:
                if passage.sender != EVE.peer_id or mutator.rng.random() >= often:
                    return passage.frame
                return mutator.frame(passage.frame, dp.StateReply if passage.frame.kind is FrameKind.MESSAGE else None)

            async def scene() -> None:
                hub = MemoryHub(change)
                us = hub.join(CLEO.peer_id)
                for voter in VOTERS:
                    hub.join(voter.peer_id).handlers.update(donor_swarm.networks[voter.peer_id].handlers)
                plan = plan_of(*VOTERS, CLEO, seats=VOTERS)
                with structlog.testing.capture_logs() as logs:
                    async with asyncio.timeout(120):
                        fetched = await catch_up(
                            us, plan, state_of(0.0), None, operator_key=OPERATOR.public_key, policy=POLICY
                        )
                assert fetched is not None
                assert fetched.head.hash == HEAD.hash
                assert torch.equal(fetched.anchor_E, STATE.anchor_E)
                assert torch.equal(fetched.momentum_E, STATE.momentum_E)
                assert {line["peer"] for line in logs if line["log_level"] == "warning"} <= {EVE.peer_id}
                await hub.close()

            asyncio.run(scene())

        join()


def test_a_reply_that_is_never_whole_is_an_error_of_ours() -> None:
    """All donors answer nonsense: joining fails, and says so."""

    async def nonsense(passage: FrameInTransit) -> Frame:
        return Frame(passage.frame.kind, b"\xff", b"")

    async def scene() -> None:
        with tempfile.TemporaryDirectory() as directory:
            donor_swarm = DonorSwarm(Path(directory))
            donor_swarm.hub._fault = nonsense
            for voter in VOTERS:
                donor_swarm.serve(voter, history(HEAD), STATE)
            with pytest.raises(AtollError):
                await catch_up(
                    donor_swarm.network,
                    plan_of(*VOTERS, CLEO, seats=VOTERS),
                    state_of(0.0),
                    None,
                    operator_key=OPERATOR.public_key,
                    policy=QUICK,
                )
            await donor_swarm.hub.close()

    asyncio.run(scene())
