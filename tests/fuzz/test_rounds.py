"""Whatever a member says in a round: the machines go on, break no promise, and commit once it is honest again."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from support.machine_plans import POLICY, layers_after, state_of
from support.machine_votes import FakeVoteSigner
from support.machine_world import World
from support.memory_network import MemoryHub
from support.mutation import CASES, Mutator, cases, seeds
from support.virtual_time import run_virtually

from atoll.core.errors import AtollError
from atoll.core.frames import Frame, FrameKind
from atoll.core.quorum import COORDINATOR
from atoll.node.rounds import types as rt
from atoll.node.rounds.member_streams import PROTOCOL, RoundLinks
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

SOON = timedelta(seconds=1)


class Liar:
    """Changes some of what one member says, and repeats other words of it to whom they were not said."""

    def __init__(self, world: World, peer: str, mutator: Mutator, often: float) -> None:
        self.lies = 0
        self.kinds: set[str] = set()
        self._world, self._peer, self._mutator, self._often = world, peer, mutator, often

    def __call__(self, sender: str, to: str, message: dp.RoundMessage) -> bool:
        rng = self._mutator.rng
        if sender != self._peer or rng.random() >= self._often:
            return False
        try:
            changed = dp.RoundMessage.FromString(self._mutator.message(message))
        except DecodeError:
            return True  # its stream ends; see below
        self.lies += 1
        self.kinds.add(str(message.WhichOneof("body")))
        receivers = [to] if rng.random() < 0.8 else [peer for peer in self._world.peers if peer != self._peer]
        for receiver in receivers:
            self._world.at(0.02, self._hear, receiver, changed)
        return rng.random() < 0.7  # or both

    def _hear(self, receiver: str, message: dp.RoundMessage) -> None:
        node = self._world.nodes[receiver]
        if not node.catching_up:
            self._world.feed(receiver, rt.Received(self._peer, message))


@pytest.mark.parametrize("examples", CASES)
def test_whatever_a_member_says(examples: int) -> None:
    @cases(examples)
    @given(seeds, st.sampled_from([0.2, 0.6, 1.0]), st.sampled_from([2, 3, 4]))
    def lie(seed: int, often: float, size: int) -> None:
        world = World(size, seed=seed)
        liar = Liar(world, world.peers[seed % size], Mutator(seed), often)
        world.network.drop = liar
        world.run(12)
        world.network.drop = lambda *_: False
        before = world.rounds()
        assert world.run(300, until=lambda: world.rounds() > before + 1 and len(world.heads()) == 1)

    lie()


def test_every_kind_of_message_is_lied_about() -> None:
    kinds: set[str] = set()
    for seed in range(30):
        world = World(3, seed=seed)
        liar = Liar(world, world.peers[seed % 3], Mutator(seed), 0.2)
        world.network.drop = liar
        world.run(12)
        kinds |= liar.kinds
    assert kinds >= {"report", "open", "ready", "start", "parts", "settle", "digest", "propose", "vote", "commit"}


def words() -> list[dp.RoundMessage]:
    """One of every kind, as valid as it is without a world."""
    number = pb.RoundId(run_id="r", plan_version=1, number=1)
    made = []
    for field in dp.RoundMessage.DESCRIPTOR.oneofs_by_name["body"].fields:
        message = dp.RoundMessage()
        inner = getattr(message, field.name)
        inner.SetInParent()
        if "round" in inner.DESCRIPTOR.fields_by_name:
            inner.round.CopyFrom(number)
        made.append(message)
    return made


WORDS = words()


@pytest.mark.parametrize("examples", CASES)
def test_whatever_frames_come_on_a_round_stream(examples: int) -> None:
    @cases(examples)
    @given(seeds)
    def write(seed: int) -> None:
        async def scene() -> None:
            hub, heard = MemoryHub(), []

            async def hear(peer: str, message: dp.RoundMessage) -> None:
                heard.append((peer, message))

            us, liar, honest = (hub.join(peer) for peer in ("us", "liar", "honest"))
            links = RoundLinks(us, hear)
            mutator = Mutator(seed)
            stream = await liar.open("us", PROTOCOL, SOON)
            try:
                for _ in range(mutator.rng.choice((1, 3, 12))):
                    valid = Frame(FrameKind.MESSAGE, mutator.rng.choice(WORDS).SerializeToString())
                    frame = mutator.frame(valid, dp.RoundMessage)
                    await stream.send(frame.kind, frame.header, frame.body)
            except AtollError:
                pass  # we hung up
            await stream.close()
            while us.tasks:
                await asyncio.wait(us.tasks, timeout=5)
            assert us.crashes == 0
            assert {peer for peer, _ in heard} <= {"liar"}
            sending = RoundLinks(honest, hear)
            sending.send("us", WORDS[0])
            await asyncio.sleep(1)
            assert heard[-1] == ("honest", WORDS[0])
            await sending.close()
            await links.close()
            await hub.close()

        run_virtually(scene())

    write()


def first_opener(world: World) -> str:
    machine = world.nodes[world.peers[0]].machine
    return machine.round_id.opener(machine.plan.openers(machine.head))


def world_with_a_lying_opener(lie: dict[str, dp.RoundMessage]) -> World:
    """Three members; the one that opens first says other things, by kind, than it should."""
    world = World(3, seed=1)
    opener = first_opener(world)

    def change(sender: str, to: str, message: dp.RoundMessage) -> bool:
        kind = str(message.WhichOneof("body"))
        if sender == opener and kind in lie:
            said = dp.RoundMessage()
            said.CopyFrom(lie[kind])
            inner = getattr(said, str(said.WhichOneof("body")))
            if kind == "settle" and said.HasField("settle"):
                inner.CopyFrom(message.settle)
                inner.ClearField("present")
                inner.present.extend(lie[kind].settle.present)
            inner.round.CopyFrom(getattr(message, kind).round)
            world.at(0.02, world.feed, to, rt.Received(opener, said))
            return True
        return False

    world.network.drop = change
    return world


@pytest.mark.parametrize("present", [(), ("p0",), ("p1",), ("p2",)])
def test_an_opener_cannot_settle_the_others_out_of_their_seats(present: tuple[str, ...]) -> None:
    world = world_with_a_lying_opener({"settle": dp.RoundMessage(settle=dp.Settle(present=present))})
    world.run(30)
    assert world.rounds() > 2
    assert all(2 * len(head.present) > 3 for head in world.committed.values())
    assert all(set(head.seats) - {COORDINATOR} == head.present for head in world.committed.values())


@pytest.mark.parametrize("instead_of", ["start", "propose"])
@pytest.mark.parametrize("payload", [b"\xff", b""])
def test_an_opener_that_proposes_nonsense_is_given_up(payload: bytes, instead_of: str) -> None:
    nonsense = dp.Propose(proposal=dp.Proposal(payload=payload))
    world = world_with_a_lying_opener({instead_of: dp.RoundMessage(propose=nonsense)})
    world.run(30)
    assert world.rounds() > 2


@pytest.mark.parametrize("seed", [4, 6, 7, 10])
def test_two_that_were_told_different_starts_commit_one_result(seed: int) -> None:
    world, once = World(2, seed=seed), []

    def change(sender: str, to: str, message: dp.RoundMessage) -> bool:
        if message.WhichOneof("body") == "start" and not once:
            other = dp.RoundMessage()
            other.CopyFrom(message)
            other.start.unix_ms += 1
            once.append(other)
            world.at(0.02, world.feed, to, rt.Received(sender, other))
            return True
        return message.WhichOneof("body") == "commit" and message.commit.round == once[0].start.round

    world.network.drop = change
    world.run(60)
    assert once
    assert world.rounds() > 2


@pytest.mark.parametrize("attested_by", [(), ("the opener",), ("the opener", "a stranger")])
def test_an_opener_cannot_have_others_vote_for_a_result_that_it_made_up(attested_by: tuple[str, ...]) -> None:
    world = World(5, seed=1)
    opener, made_up, told = first_opener(world), b"m" * 32, []
    world.nodes[opener].staged.add(made_up)

    def change(sender: str, to: str, message: dp.RoundMessage) -> bool:
        if message.WhichOneof("body") != "propose" or sender != opener or message.propose.round.number != 1:
            return False
        manifest = manifest_pb2.Manifest.FromString(message.propose.proposal.payload)
        del manifest.layers[:]
        manifest.layers.extend(layers_after(POLICY, world.nodes[to].machine.head, made_up))
        proposal = dp.Proposal(payload=manifest.SerializeToString(deterministic=True))
        for name in attested_by:
            word = FakeVoteSigner(opener if name == "the opener" else name).attest(proposal.payload)
            proposal.attestations.append(word)
        lie = dp.RoundMessage()
        lie.CopyFrom(message)
        lie.propose.proposal.CopyFrom(proposal)
        told.append(to)
        world.at(0.02, world.feed, to, rt.Received(opener, lie))
        return True

    world.network.drop = change
    world.run(10)
    assert told
    assert made_up not in {state_of(payload) for payload in world.ledger.votes.values()}
