"""State arrives whole and true from donors that lie, break off or fall silent, or it does not arrive."""

import asyncio
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from support.donors import (
    ANN,
    BOB,
    CLEO,
    DAN,
    EVE,
    FAY,
    GENESIS,
    OFFSETS,
    OPERATOR,
    QUICK,
    DonorSwarm,
    after,
    commit,
    cuts_short,
    dies,
    freezes,
    history,
    is_silent,
    lies,
    plan_of,
    state_of,
)
from support.virtual_time import in_virtual_time, run_virtually

from atoll.core.errors import AtollError, Busy, CheckpointCorrupt, NotFound, PeerMisbehaved, Unreachable
from atoll.core.fragments import split_into_fragments
from atoll.core.manifest import Head
from atoll.node.state.anchor import AnchorState
from atoll.node.state.catchup import catch_up
from atoll.node.state.fetch import FetchTarget, fetch_state
from atoll.node.state.outer_step import matches_digests
from atoll.node.state.pieces import Workspace, pieces_of
from atoll.node.state.state_client import StateClient

STATE = state_of(3.0)
DONORS = (ANN, BOB, DAN, EVE)
HEAD = commit(STATE, 1, list(DONORS), after=GENESIS)
PLAN = plan_of(*DONORS, CLEO, seats=DONORS)
CHUNKS = 2 * (3 + 4 + 4)  # of sixteen elements, in layers of 40, 60, 0 and 64


@pytest.fixture
def donor_swarm(tmp_path):
    return DonorSwarm(tmp_path)


async def fetch(donor_swarm, ours=None, held=None, plan=PLAN, policy=QUICK):
    return await catch_up(
        donor_swarm.network, plan, ours or state_of(9.0), held, operator_key=OPERATOR.public_key, policy=policy
    )


def is_true(fetched, state=STATE) -> bool:
    return torch.equal(fetched.anchor_E, state.anchor_E) and torch.equal(fetched.momentum_E, state.momentum_E)


@in_virtual_time
async def test_every_donor_does_a_share(donor_swarm):
    for member in DONORS:
        donor_swarm.serve(member, history(HEAD), STATE)
    assert is_true(await fetch(donor_swarm))
    assert set(donor_swarm.bodies) == {member.peer_id for member in DONORS}
    assert sum(donor_swarm.bodies.values()) == CHUNKS


@in_virtual_time
async def test_of_genesis_only_the_anchor_travels(donor_swarm):
    """Its momentum is zero; one node has to send it to all others."""
    genesis = state_of(3.0)
    genesis.momentum_E = torch.zeros_like(genesis.anchor_E)
    head = commit(genesis, 0, [])
    donor_swarm.serve(ANN, [head], genesis)
    fetched = await fetch(
        donor_swarm, AnchorState(torch.zeros(OFFSETS[-1]), OFFSETS), plan=plan_of(ANN, CLEO, base=head)
    )
    assert is_true(fetched, genesis)
    assert donor_swarm.bodies[ANN.peer_id] == CHUNKS / 2


@in_virtual_time
async def test_the_stream_that_told_the_head_brings_the_state_too(donor_swarm):
    """Another one would cost round trips, and where it is a connection of its own, a slow start."""
    opened = []
    dial = donor_swarm.network.open

    async def count(peer, protocol, timeout):
        opened.append(peer)
        return await dial(peer, protocol, timeout)

    donor_swarm.network.open = count
    for member in DONORS:
        donor_swarm.serve(member, history(HEAD), STATE)
    assert is_true(await fetch(donor_swarm))
    assert sorted(opened) == sorted(member.peer_id for member in DONORS)
    assert await fetch(donor_swarm, STATE, HEAD) is None
    async with asyncio.timeout(5):  # nothing was left open
        for member in DONORS:
            while tasks := donor_swarm.networks[member.peer_id].tasks:
                await asyncio.wait(tasks)


@pytest.mark.parametrize("fault", [lies, cuts_short, is_silent, dies, after(2, dies), after(1, freezes)])
@in_virtual_time
async def test_one_true_donor_among_four_is_enough(donor_swarm, fault):
    for member in DONORS:
        donor_swarm.serve(member, history(HEAD), STATE)
    for member in DONORS[1:]:
        donor_swarm.behaviours[member.peer_id] = fault
    assert is_true(await fetch(donor_swarm))


@in_virtual_time
async def test_liars_are_found_out_at_the_price_of_one_piece_each_and_named(donor_swarm):
    for member in DONORS:
        donor_swarm.serve(member, history(HEAD), STATE)
    liars = {member.peer_id for member in DONORS[1:]}
    donor_swarm.behaviours = dict.fromkeys(liars, lies)
    with capture_logs() as logs:
        assert is_true(await fetch(donor_swarm))
    assert {line["peer"] for line in logs if line["event"] == "donor dropped"} <= liars
    assert all(donor_swarm.bodies.get(liar, 0) <= 4 for liar in liars)


@in_virtual_time
async def test_bytes_that_nobody_has_right_are_an_error_that_names_the_donors(donor_swarm):
    for member in DONORS:
        donor_swarm.serve(member, history(HEAD), STATE)
        donor_swarm.behaviours[member.peer_id] = lies
    with pytest.raises(Unreachable, match=ANN.peer_id):
        await fetch(donor_swarm)


@in_virtual_time
async def test_a_stream_that_breaks_costs_what_was_under_way(donor_swarm):
    donor_swarm.serve(ANN, history(HEAD), STATE)
    calls = 0

    async def breaks_once(frame):
        nonlocal calls
        calls += 1
        return Unreachable("reset") if calls == 10 else frame

    donor_swarm.behaviours[ANN.peer_id] = breaks_once
    assert is_true(await fetch(donor_swarm))
    assert donor_swarm.bodies[ANN.peer_id] <= CHUNKS + 2 * QUICK.max_requests_in_flight


@in_virtual_time
async def test_a_node_back_from_sleep_fetches_only_what_changed(donor_swarm):
    anchor_E, momentum_E = STATE.anchor_E.clone(), STATE.momentum_E.clone()
    momentum_E[OFFSETS[1] : OFFSETS[2]] += 1.0  # four chunks
    later = AnchorState(anchor_E, OFFSETS)
    later.momentum_E = momentum_E
    head = commit(later, 2, list(DONORS), after=HEAD)
    for member in DONORS:
        donor_swarm.serve(member, history(HEAD, head), later)
    assert is_true(await fetch(donor_swarm, ours=STATE, held=HEAD), later)
    assert sum(donor_swarm.bodies.values()) == 4


@in_virtual_time
async def test_when_the_head_moves_on_only_what_changed_is_fetched_again(donor_swarm):
    later = AnchorState(STATE.anchor_E, OFFSETS)
    later.momentum_E = STATE.momentum_E + 1.0
    head = commit(later, 2, list(DONORS), after=HEAD)
    holding = donor_swarm.serve(ANN, history(HEAD), STATE)
    plan = plan_of(ANN, CLEO, seats=DONORS)
    anchor_chunks = 0

    async def moves_on(frame):
        nonlocal anchor_chunks
        if (frame.body == b"") is False and holding.head.hash == HEAD.hash:
            anchor_chunks += 1
            if anchor_chunks == CHUNKS - 2:
                holding.hold(head, later)
        return frame

    donor_swarm.behaviours[ANN.peer_id] = moves_on
    assert is_true(await fetch(donor_swarm, plan=plan), later)
    assert donor_swarm.bodies[ANN.peer_id] < 2 * CHUNKS - 5


def goes_on(holding, head, state):
    """A donor's head moves on with its first body."""

    async def behave(frame):
        holding.hold(head, state)
        return frame

    return behave


@in_virtual_time
async def test_who_stays_behind_and_hardly_answers_does_not_hold_a_fetch_when_the_others_moved_on(donor_swarm):
    later = state_of(5.0)
    head = commit(later, 2, list(DONORS), after=HEAD)
    for member in DONORS[:3]:
        donor_swarm.behaviours[member.peer_id] = goes_on(donor_swarm.serve(member, history(HEAD), STATE), head, later)
    donor_swarm.serve(EVE, history(HEAD), STATE)
    donor_swarm.behaviours[EVE.peer_id] = after(1, freezes)
    slow = replace(QUICK, answer_timeout=timedelta(hours=1), stragglers_timeout=timedelta(milliseconds=100))
    async with asyncio.timeout(20):
        assert is_true(await fetch(donor_swarm, policy=slow), later)


@in_virtual_time
async def test_who_stays_behind_and_gives_the_rest_in_time_is_not_left_for_those_who_moved_on(donor_swarm):
    later = state_of(5.0)
    head = commit(later, 2, list(DONORS), after=HEAD)
    for member in DONORS[:3]:
        donor_swarm.behaviours[member.peer_id] = goes_on(donor_swarm.serve(member, history(HEAD), STATE), head, later)
    donor_swarm.serve(EVE, history(HEAD), STATE)
    assert is_true(await fetch(donor_swarm, policy=replace(QUICK, stragglers_timeout=timedelta(seconds=20))))


@in_virtual_time
async def test_a_head_that_never_stands_still_is_an_error(donor_swarm):
    holding = donor_swarm.serve(ANN, history(HEAD), STATE)
    plan = plan_of(ANN, CLEO, seats=DONORS)
    number = 1

    async def runs_away(frame):
        nonlocal number
        number += 1
        holding.hold(commit(STATE, number, list(DONORS), after=holding.head), STATE)
        return frame

    donor_swarm.behaviours[ANN.peer_id] = runs_away
    with pytest.raises(Unreachable, match="moved on"):
        await fetch(donor_swarm, plan=plan, policy=replace(QUICK, max_restarts=2))


@in_virtual_time
async def test_a_donor_that_changes_its_state_is_asked_again(donor_swarm):
    holding = donor_swarm.serve(ANN, history(HEAD), STATE)
    count = 0

    async def moves_for_a_while(frame):
        nonlocal count
        count += 1
        if count == 5:
            holding.moving = True
            asyncio.get_running_loop().call_later(0.005, setattr, holding, "moving", False)
        return frame

    donor_swarm.behaviours[ANN.peer_id] = moves_for_a_while
    patient = replace(QUICK, max_failures=8)
    assert is_true(await fetch(donor_swarm, plan=plan_of(ANN, CLEO, seats=DONORS), policy=patient))


@in_virtual_time
async def test_a_head_of_another_model_is_an_error_not_a_crash(donor_swarm):
    odd = AnchorState(torch.ones(164), (0, 10, 20, 100, 164))
    head = commit(odd, 1, list(DONORS), after=GENESIS)
    for member in DONORS:
        donor_swarm.serve(member, history(head), STATE)
    with pytest.raises(CheckpointCorrupt):
        await fetch(donor_swarm)


# --- what one peer may ask -------------------------------------------------------------------------------


async def talk(donor_swarm, run_id="r"):
    return await StateClient.connect(donor_swarm.network, ANN.peer_id, run_id, timedelta(seconds=1))


@pytest.mark.parametrize(("start", "end"), [(0, 165), (5, 5), (6, 5), (2**63, 2**63 + 1), (0, 2**64 - 1)])
@in_virtual_time
async def test_nothing_outside_the_vector_is_served(donor_swarm, start, end):
    donor_swarm.serve(ANN, history(HEAD), STATE)
    conversation = await talk(donor_swarm)
    await conversation.request_slice("anchor", HEAD.hash, start, end)
    with pytest.raises(PeerMisbehaved):
        await conversation.receive_slice(1)


@in_virtual_time
async def test_no_more_than_the_cap_is_served_at_once(donor_swarm):
    big = AnchorState(torch.zeros((1 << 20) + 1), (0, (1 << 20) + 1))
    head = commit(big, 1, list(DONORS), after=GENESIS)
    donor_swarm.serve(ANN, history(head), big)
    conversation = await talk(donor_swarm)
    await conversation.request_slice("momentum", head.hash, 0, 1 << 20)
    assert len(await conversation.receive_slice(1 << 20)) == 4 << 20
    await conversation.request_slice("momentum", head.hash, 0, (1 << 20) + 1)
    with pytest.raises(PeerMisbehaved):
        await conversation.receive_slice((1 << 20) + 1)


@in_virtual_time
async def test_four_conversations_at_once_and_not_five(donor_swarm):
    donor_swarm.serve(ANN, history(HEAD), STATE)
    talks = [await talk(donor_swarm) for _ in range(4)]
    for conversation in talks:
        assert (await conversation.manifest(None)).hash == HEAD.hash
    with pytest.raises(PeerMisbehaved):
        await (await talk(donor_swarm)).manifest(None)
    await talks[0].close()
    async with asyncio.timeout(1):
        while True:
            again = await talk(donor_swarm)
            try:
                assert (await again.manifest(None)).hash == HEAD.hash
                return
            except PeerMisbehaved:
                await asyncio.sleep(0)  # it has not noticed yet


@in_virtual_time
async def test_what_is_not_held_is_refused_by_name(donor_swarm):
    holding = donor_swarm.serve(ANN, history(HEAD), STATE)
    with pytest.raises(NotFound):
        await (await talk(donor_swarm)).manifest(17)
    with pytest.raises(NotFound):
        await (await talk(donor_swarm, "another run")).manifest(None)
    for state_hash, moving, error in ((GENESIS.hash, False, NotFound), (HEAD.hash, True, Busy)):
        holding.moving = moving
        conversation = await talk(donor_swarm)
        await conversation.request_slice("anchor", state_hash, 0, 1)
        with pytest.raises(error):
            await conversation.receive_slice(1)
        await conversation.close()


# --- any mixture of donors -------------------------------------------------------------------------------

COUNTS = st.integers(0, 12)
FAULTS = st.one_of(
    st.just(None),
    st.just(lies),
    st.just(cuts_short),
    st.just(is_silent),
    *(st.builds(after, COUNTS, st.just(fault)) for fault in (lies, dies, freezes)),
    st.just("moves"),
    st.just("forges"),
)


@settings(max_examples=20, deadline=None)
@given(st.lists(FAULTS, min_size=1, max_size=5), st.booleans())
def test_what_is_adopted_is_true_and_everything_else_a_typed_error_in_time(faults, local):
    async def once(directory: Path) -> None:
        donor_swarm = DonorSwarm(directory)
        members = (ANN, BOB, DAN, EVE, FAY)[: len(faults)]
        later = state_of(5.0)
        head = commit(STATE, 1, list(members), after=GENESIS)
        next_head = commit(later, 2, list(members), after=head)
        for member, fault in zip(members, faults, strict=True):
            poison = state_of(666.0)
            if fault == "forges":
                donor_swarm.serve(member, history(head, commit(poison, 50, [member], after=head)), poison)
                continue
            holding = donor_swarm.serve(member, history(head), STATE)
            if fault == "moves":

                async def moves(frame, holding=holding):
                    holding.hold(next_head, later)
                    return frame

                donor_swarm.behaviours[member.peer_id] = moves
            elif fault is not None:
                donor_swarm.behaviours[member.peer_id] = fault
        plan = plan_of(*members, CLEO, seats=members)
        ours = state_of(3.0) if local else state_of(9.0)
        ours.momentum_E += 1.0
        started = asyncio.get_running_loop().time()
        try:
            fetched = await fetch(donor_swarm, ours=ours, held=GENESIS if local else None, plan=plan)
            expected = {head.hash: STATE, next_head.hash: later}.get(fetched.head.hash)
            if expected is None:  # only where forgers are all there is
                assert faults == ["forges"]
            else:
                assert is_true(fetched, expected)
        except AtollError:
            honest = sum(fault is None for fault in faults)
            assert 2 * honest <= len(faults)
        assert asyncio.get_running_loop().time() - started < 10
        await donor_swarm.hub.close()

    with tempfile.TemporaryDirectory() as directory:
        run_virtually(once(Path(directory)))


# --- fragments -----------------------------------------------------------------------------------------


def stepped(before: AnchorState, head: Head, index: int) -> tuple[AnchorState, Head]:
    """The round after `head` that averages one of two fragments."""
    fragment = split_into_fragments(OFFSETS, 2)[index]
    staging = before.staging(fragment, 0.7, 0.9)
    staging.take(0, torch.ones(fragment.elements))
    staged = staging.finish(head)
    state = AnchorState(before.anchor_E.clone(), OFFSETS)
    state.momentum_E = before.momentum_E.clone()
    state.commit(staged)
    return state, commit(state, head.round + 1, list(DONORS), after=head, layers=staged.layers)


@in_virtual_time
async def test_what_no_round_has_changed_is_given_out_under_an_older_head(donor_swarm):
    """Else nobody could catch up whose link is slower than the rounds of fragments."""
    holding = donor_swarm.serve(ANN, history(HEAD), STATE)
    first, second = split_into_fragments(OFFSETS, 2)
    conversation = await StateClient.connect(donor_swarm.network, ANN.peer_id, "r", QUICK.answer_timeout)
    assert (await conversation.manifest(None)).hash == HEAD.hash
    state, head = stepped(STATE, HEAD, 0)
    holding.hold(head, state)
    await conversation.request_slice("anchor", HEAD.hash, second.start, second.start + 8)
    body = await conversation.receive_slice(8)
    assert bytes(body) == STATE.anchor_E[second.start : second.start + 8].numpy().tobytes()
    await conversation.request_slice("anchor", HEAD.hash, first.start, first.start + 8)
    with pytest.raises(NotFound):
        await conversation.receive_slice(8)
    await conversation.close()


@in_virtual_time
async def test_who_is_slower_than_the_rounds_of_fragments_catches_up_all_the_same(donor_swarm):
    """After every ten chunks the donors move on; the whole state has 22, and no part of it outlasts two moves."""
    holdings = [donor_swarm.serve(member, history(HEAD), STATE) for member in DONORS]
    sent, now = 0, (STATE, HEAD)

    async def moves_on(frame):
        nonlocal sent, now
        sent += 1
        if sent % 10 == 0:
            now = stepped(*now, now[1].round % 2)
            for holding in holdings:
                holding.hold(now[1], now[0])
        return frame

    for member in DONORS:
        donor_swarm.behaviours[member.peer_id] = moves_on
    fetched = await fetch(donor_swarm)
    assert fetched.head.round > 1
    assert matches_digests(fetched.head.manifest.layers, fetched.anchor_E, fetched.momentum_E, OFFSETS)


@in_virtual_time
async def test_who_goes_back_to_an_earlier_head_finds_nothing_of_a_later_one(donor_swarm):
    """Half of a later state came over what was verified; then its donor was gone."""
    old, new = STATE, state_of(9.0)
    later = commit(new, 2, list(DONORS), after=HEAD)
    workspace = Workspace(0, OFFSETS[-1])
    donor_swarm.serve(ANN, history(HEAD), old)
    donor_swarm.serve(BOB, history(HEAD, later), new)
    donor_swarm.behaviours[BOB.peer_id] = after(5, dies)
    wanted = {
        head.round: FetchTarget("r", head.hash, pieces_of(head.manifest.layers, OFFSETS)) for head in (HEAD, later)
    }
    await fetch_state(donor_swarm.network, [ANN.peer_id], wanted[1], workspace, QUICK)
    with pytest.raises(Unreachable):
        await fetch_state(donor_swarm.network, [BOB.peer_id], wanted[2], workspace, QUICK)
    await fetch_state(donor_swarm.network, [ANN.peer_id], wanted[1], workspace, QUICK)
    assert torch.equal(workspace.vectors["anchor"], old.anchor_E)
    assert torch.equal(workspace.vectors["momentum"], old.momentum_E)
