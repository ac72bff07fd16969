"""Engines with real trainer processes, joined by an in-process network that can be slow or cut."""

import asyncio
import threading
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from support.eventually import eventually
from support.machine_plans import make_plan
from support.memory_network import MemoryHub
from support.process_swarm import MODEL, SPEC, write_corpus

from atoll.core import protocol
from atoll.core.clock import SystemClock
from atoll.core.errors import Unreachable
from atoll.core.fragments import split_into_fragments
from atoll.core.frames import FrameKind
from atoll.core.identity import Identity
from atoll.core.manifest import Head, verify_vote
from atoll.core.plan import Base, Plan
from atoll.core.run_spec import parse_run_spec
from atoll.core.verdicts import partial_contributions
from atoll.node.exchange.codecs import CODECS
from atoll.node.exchange.exchange_server import ExchangeServer
from atoll.node.exchange.exchange_streams import PROTOCOL as AVERAGE
from atoll.node.rounds import catching_up
from atoll.node.rounds import types as rt
from atoll.node.rounds.callbacks import RoundCallbacks, RoundCounters
from atoll.node.rounds.engine import AveragingEngine
from atoll.node.rounds.installed_state import InstalledState
from atoll.node.rounds.member_streams import PROTOCOL as ROUND
from atoll.node.rounds.member_streams import RoundLinks
from atoll.node.rounds.policy import policies
from atoll.node.rounds.run_member import RunMember
from atoll.node.rounds.snapshot_ledger import CountedShare
from atoll.node.state.anchor import AnchorState
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.outer_step import matches_digests
from atoll.node.state.state_server import StateServer
from atoll.node.state.vote_store import VoteStore
from atoll.node.trainer.trainer import Trainer, TrainerConfig
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

TIMEOUT = timedelta(seconds=180)
OPERATOR = Identity.generate()
DEADLINES = timedelta(seconds=180)  # of an attempt whose opener is cut off in the middle of it, and of the next


async def no_coordinator(round_id, proposal) -> rt.CoordinatorVote:
    return rt.CoordinatorVote(round_id, proposal, False, None, None, "there is none")


def fresh_votes(directory) -> VoteStore:
    directory.mkdir(exist_ok=True)
    store = VoteStore(directory)
    store.begin()
    return store


class Member:
    """One node's engine with everything below it real, but for the network."""

    def __init__(self, identity, trainer, network, spec, directory):
        self.identity, self.trainer, self.network, self.spec, self.directory = (
            identity,
            trainer,
            network,
            spec,
            directory,
        )
        self.state = AnchorState(trainer.anchor, trainer.facts.layer_offsets)
        self.fragments = split_into_fragments(self.state.offsets, spec.sync.fragments)
        self.heads: list[Head] = []
        self.counters = RoundCounters()
        self.committed = asyncio.Condition()
        self.reports = []
        self.evaluations = []
        self.audits = []

    async def begin(self, head: Head, plan: Plan, ranges) -> None:
        await self.trainer.load(ranges=ranges, committed_tokens=0)
        await self.trainer.train()
        manifests = ManifestStore(self.directory / "manifests", self.spec.run.name)
        self.engine = AveragingEngine(
            RunMember(self.identity, self.spec, OPERATOR.public_key, self.network, SystemClock()),
            policies(self.spec, self.trainer.facts.layer_offsets),
            self.trainer,
            InstalledState(head, self.state, manifests),
            plan,
            votes=fresh_votes(self.directory),
            exchanges=ExchangeServer(self.network, timedelta(seconds=5)),
            counters=self.counters,
            callbacks=RoundCallbacks(
                committed=self.heads.append,
                report=self.reports.append,
                evaluated=self.evaluations.append,
                audited=self.audits.append,
                ask_coordinator=no_coordinator,
                plan_newer_than=lambda _: None,
                plan_shared=lambda _: None,
            ),
        )
        StateServer(self.network, self.spec.run.name, manifests, self._current)
        self.links = RoundLinks(self.network, self.engine.receive, self.engine.lost)
        self.running = asyncio.create_task(self.engine.run(self.links))

    def _current(self):
        return None if self.engine.moving else (self.engine.head, self.state)

    async def rounds(self, count: int, timeout: timedelta = TIMEOUT) -> None:
        async with asyncio.timeout(timeout.total_seconds()):
            while len(self.heads) < count:
                if self.running.done():
                    self.running.result()
                await asyncio.sleep(0.05)

    async def end(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.links.close()


@asynccontextmanager
async def members(tmp_path, count, fault, codec="int4", round_tokens=2000, fragments=1):
    corpus = write_corpus(tmp_path / "corpus.txt")
    text = SPEC.format(model=MODEL, nodes=count, tokens=10**9, corpus=corpus, round_tokens=round_tokens, codec=codec)
    text += f"fragments = {fragments}\n"
    spec = parse_run_spec(text)
    hub = MemoryHub(fault)
    async with AsyncExitStack() as stack:
        spawned = [
            Trainer.spawn(
                TrainerConfig(text, device="cpu", minimum_step_seconds=0.05),
                log_path=tmp_path / f"{i}.log",
                timeout=TIMEOUT,
            )
            for i in range(count)
        ]
        made = []
        for i, trainer in enumerate(await asyncio.gather(*spawned)):
            stack.push_async_callback(trainer.stop, timedelta(seconds=5))
            identity = Identity.generate()
            made.append(Member(identity, trainer, hub.join(identity.peer_id), spec, tmp_path / str(i)))
        await made[0].trainer.initialise()
        for member in made[1:]:
            member.trainer.anchor.copy_(made[0].trainer.anchor)
        layers = made[0].state.layer_states(0)
        payload = manifest_pb2.Manifest(
            protocol=protocol.ours(), round=pb.RoundId(run_id="reef"), layers=layers
        ).SerializeToString()
        head = Head(manifest_pb2.CommittedManifest(payload=payload))
        last = len(made[0].state.offsets) - 2
        peers = sorted(member.identity.peer_id for member in made)
        base = make_plan(peers, routes=[[(peer, 0, last)] for peer in peers])
        plan = Plan("reef", 1, base.assignments, base.routes, Base(head.hash, base.base.seats))
        for member in made:
            ranges = plan.assignment(member.identity.peer_id).data_ranges
            await member.begin(head, plan, ranges)
            stack.push_async_callback(member.end)
        yield made
        for member in made:
            await member.end()
        await hub.close()


@pytest.mark.timeout(400)
async def test_inner_steps_go_on_while_parts_are_exchanged(tmp_path):
    """In each round, a part of each member arrives only when its sender has trained on."""
    trained_on: dict[tuple[str, int], int] = {}  # steps while a part was under way, by sender and round
    sending: dict[str, Member] = {}

    async def slow(passage):
        member = sending.get(passage.sender)
        if passage.protocol == AVERAGE and passage.frame.kind is FrameKind.PART and member is not None:
            at, trainer = (passage.sender, len(member.heads)), member.trainer
            if at not in trained_on:
                before, trained_on[at] = trainer.status.steps, 0
                await eventually(lambda: trainer.status.steps >= before + 10)
                trained_on[at] = trainer.status.steps - before
        return passage.frame

    async with members(tmp_path, 2, slow) as made:
        sending.update({member.identity.peer_id: member for member in made})
        await asyncio.gather(*(member.rounds(2) for member in made))
        assert made[0].heads[1].hash == made[1].heads[1].hash
        for member in made:
            assert max(steps for (peer, _), steps in trained_on.items() if peer == member.identity.peer_id) >= 10
            carried = member.trainer.status.progress_tokens
            assert carried > 0  # what was trained during the exchange is progress of the next round


@pytest.mark.timeout(400)
async def test_a_broken_part_is_repaired_or_its_contribution_spent_and_replicas_stay_equal(tmp_path):
    broken = []

    async def fault(passage):
        if passage.protocol == AVERAGE and passage.frame.kind is FrameKind.PART and len(broken) < 1:
            broken.append(passage)
            return type(passage.frame)(passage.frame.kind, passage.frame.header, bytes(passage.frame.body)[:-1])
        return passage.frame

    async with members(tmp_path, 2, fault) as made:
        await asyncio.gather(*(member.rounds(2) for member in made))
        assert broken
        assert [head.hash for head in made[0].heads[:2]] == [head.hash for head in made[1].heads[:2]]
        first = made[0].heads[0].manifest
        assert partial_contributions(first) or first.round.attempt
        assert torch.equal(made[0].state.anchor_E, made[1].state.anchor_E)


@pytest.mark.timeout(400)
async def test_a_vote_is_on_disk_before_it_is_sent(tmp_path):
    recorded: dict[str, list[int]] = {}
    stores: dict[str, VoteStore] = {}

    async def watch(passage):
        if passage.protocol == ROUND and passage.sender in stores:
            message = dp.RoundMessage.FromString(passage.frame.header)
            if message.HasField("vote"):
                record = stores[passage.sender].load()
                assert record is not None
                assert record.voted is not None
                verify_vote(record.voted.payload, record.voted.ballot, message.vote.signature, passage.sender)
                recorded.setdefault(passage.sender, []).append(record.number)
        return passage.frame

    async with members(tmp_path, 2, watch) as made:
        stores.update({member.identity.peer_id: VoteStore(member.directory) for member in made})
        await asyncio.gather(*(member.rounds(3) for member in made))
        assert recorded


@pytest.mark.timeout(400)
async def test_what_a_round_holds_is_not_reported_again_while_its_state_is_written(tmp_path):
    """A large state takes seconds; rounds must not open for tokens that were just counted."""
    trainers: dict[str, Trainer] = {}
    counted: Counter[tuple[str, int]] = Counter()  # tokens, by member and round
    reports: list[tuple[int, int]] = []  # of the second round: tokens, and what no round held then
    reported = threading.Event()

    async def watch(passage):
        message = dp.RoundMessage.FromString(passage.frame.header) if passage.protocol == ROUND else dp.RoundMessage()
        if message.HasField("commit"):
            manifest = manifest_pb2.Manifest.FromString(message.commit.manifest.payload)
            for item in manifest.contributions:
                counted[item.peer_id, manifest.round.number] = item.tokens
        if message.HasField("report") and message.report.round.number == 2:
            left = trainers[passage.sender].status.tokens - counted[passage.sender, 1]
            reports.append((message.report.tokens, left))
            if len(reports) == 4:
                reported.set()
        return passage.frame

    async with members(tmp_path, 2, watch, round_tokens=4000) as made:
        trainers.update({member.identity.peer_id: member.trainer for member in made})
        for member in made:
            commit = member.state.commit
            member.state.commit = lambda staged, commit=commit: (reported.wait(120), commit(staged))
        await asyncio.gather(*(member.rounds(2) for member in made))
        assert reported.is_set()
        assert all(tokens <= left for tokens, left in reports)


@pytest.mark.timeout(600)
async def test_fragments_take_turns_replicas_stay_equal_and_who_was_away_catches_up(tmp_path):
    """The one that is away hears of no round for a while: it fetches what changed, and its progress enters a round."""
    away: set[str] = set()

    async def fault(passage):
        if passage.sender in away and passage.protocol == ROUND:
            raise Unreachable("the link is down")
        return passage.frame

    async with members(tmp_path, 3, fault, fragments=2) as made:
        await asyncio.gather(*(member.rounds(3) for member in made))
        late = made[2]
        away.add(late.identity.peer_id)
        until = len(made[0].heads) + 4
        await asyncio.gather(*(member.rounds(until) for member in made[:2]))
        away.clear()
        newest = made[0].heads[-1].round
        await _counts_again(late, newest)
        number = late.heads[-1].round
        await asyncio.gather(*(_reaches(member, number) for member in made))
        for member in made:
            await member.end()
        chains = [{head.round: head for head in member.heads} for member in made]
        for number in chains[0].keys() & chains[2].keys():
            assert chains[0][number].hash == chains[2][number].hash
        for before, after in pairwise(made[0].heads):
            layers = zip(before.manifest.layers, after.manifest.layers, strict=True)
            changed = [old != new for old, new in layers]
            middle = next(f.first_layer for f in made[0].fragments if f.index == 1)
            first = after.manifest.round.fragment == 0
            assert changed == [first] * middle + [not first] * (len(changed) - middle)
        evaluated = {report.round for member in made for report in member.evaluations}
        assert evaluated  # once a turn
        assert all(number % 2 == 0 for number in evaluated)
        for member in made:
            layers, offsets = member.heads[-1].manifest.layers, member.state.offsets
            assert matches_digests(layers, member.state.anchor_E, member.state.momentum_E, offsets)


async def _counts_again(member, number):
    """Until a round after that one holds something of the member's."""

    def counted(head):
        mine = [item for item in head.manifest.contributions if item.peer_id == member.identity.peer_id]
        return head.round > number and any(item.weight for item in mine)

    async with asyncio.timeout(TIMEOUT.total_seconds()):
        while not any(map(counted, member.heads)):
            if member.running.done():
                member.running.result()
            await asyncio.sleep(0.05)


async def _reaches(member, number):
    async with asyncio.timeout(TIMEOUT.total_seconds()):
        while member.engine.head.round < number:
            if member.running.done():
                member.running.result()
            await asyncio.sleep(0.05)


@pytest.mark.timeout(600)
async def test_a_member_that_trains_backwards_is_left_out_of_sums_and_hears_of_it(tmp_path, monkeypatch):
    """Its replica stays equal to the others', its tokens do not count, and everybody can read why."""

    async def honest(passage):
        return passage.frame

    async with members(tmp_path, 4, honest) as made:
        *rest, bad = made
        # Few steps of so small a model agree in few parts, by chance. A common direction makes them agree in all.
        common_E = torch.randn(bad.trainer.pseudo_gradient.numel(), generator=torch.Generator().manual_seed(0))

        def train_as(member, sign):
            snapshot = member.trainer.snapshot

            async def taken_with(start, end):
                taken = await snapshot(start, end)
                update_E = member.trainer.pseudo_gradient
                update_E.add_(common_E, alpha=float(2 * update_E.norm() / common_E.norm())).mul_(sign)
                return taken

            monkeypatch.setattr(member.trainer, "snapshot", taken_with)

        for member in rest:
            train_as(member, 1)
        train_as(bad, -5)
        await asyncio.gather(*(member.rounds(4) for member in made))
        for number in range(1, 4):
            manifest = bad.heads[number].manifest
            assert len({member.heads[number].hash for member in made}) == 1
            mine = [item.peer_id for item in manifest.contributions].index(bad.identity.peer_id)
            assert {verdict.contributor for verdict in manifest.verdicts} == {mine}
            left_out = sum(verdict.parts_left_out for verdict in manifest.verdicts)
            assert left_out == manifest.parts_total
            assert manifest.contributions[mine].weight > manifest.contributions[mine].tokens == 0
        assert bad.counters.left_out >= 3
        assert not any(member.counters.left_out for member in rest)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "cut off"])
async def test_who_was_away_for_long_brings_what_it_trained_meanwhile_and_nothing_stale(tmp_path, frozen, monkeypatch):
    cut: set[str] = set()

    async def cutting(passage):
        return None if passage.sender in cut or passage.receiver in cut else passage.frame

    async with members(tmp_path, 3, cutting) as made:
        *rest, away = made
        kept: list[str] = []
        for order in ("load", "rebase", "apply"):
            carry_out = getattr(away.trainer, order)

            async def told(order=order, carry_out=carry_out, **arguments):
                kept.append(order)
                await carry_out(**arguments)

            monkeypatch.setattr(away.trainer, order, told)
        await asyncio.gather(*(member.rounds(3) for member in made))
        cut.add(away.identity.peer_id)
        if frozen:
            await away.trainer.pause()
        there = len(rest[0].heads)
        await asyncio.gather(*(member.rounds(there + 6, DEADLINES) for member in rest))
        kept.clear()
        cut.clear()
        async with asyncio.timeout(TIMEOUT.total_seconds()):
            while not kept:  # it is paused until then: what it trains before it hears of the head is not stale
                await asyncio.sleep(0.02)
        assert kept[0] == "load" if frozen else kept[0] in ("rebase", "apply")
        await away.trainer.train()
        there = len(away.heads)
        await away.rounds(there + 3)


@pytest.mark.timeout(400)
async def test_what_a_commit_held_is_known_though_the_machine_went_on_meanwhile(tmp_path):
    cut: set[str] = set()

    async def cutting(passage):
        return None if passage.sender in cut or passage.receiver in cut else passage.frame

    async with members(tmp_path, 2, cutting) as made:
        await asyncio.gather(*(member.rounds(3) for member in made))
        cut.add(made[0].identity.peer_id)
        async with asyncio.timeout(TIMEOUT.total_seconds()):
            while made[0].heads[-1].hash != made[0].engine.head.hash:
                await asyncio.sleep(0.02)
        *_, before, last = made[0].heads
        assert made[0].identity.peer_id in {item.peer_id for item in last.manifest.contributions}
        share = await made[0].engine._catching_up._share_after(before, last)
        assert share.counted is rt.Counted.SNAPSHOT


@pytest.mark.timeout(400)
async def test_progress_that_cannot_be_kept_ends_the_engine_and_not_only_a_catch_up(tmp_path, monkeypatch):
    async def through(passage):
        return passage.frame

    async def found(*_, **__):
        return SimpleNamespace(head=engine.head)

    async def fails(*_):
        raise Unreachable("the trainer does not answer")

    async def moves(*_):
        pass

    async with members(tmp_path, 2, through) as made:
        await made[0].rounds(1)
        engine = made[0].engine
        monkeypatch.setattr(catching_up, "catch_up", found)
        monkeypatch.setattr(engine._installed, "move", moves)
        monkeypatch.setattr(engine._progress, "keep", fails)
        with pytest.raises(Unreachable, match="trainer"):
            await engine._catching_up._catch_up(CountedShare(rt.Counted.NOTHING))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kept", [True, False])
async def test_who_cannot_tell_what_of_its_progress_counted_begins_at_the_anchor(tmp_path, monkeypatch, kept):
    """Rounds hold a snapshot that made room for another, and the state of their result is still here, or is fetched."""

    async def through(passage):
        return passage.frame

    async with members(tmp_path, 2, through) as made:
        await made[0].rounds(1)
        engine, told = made[0].engine, []
        machine, known = engine._machine, engine._machine.counted

        def outlived(manifest):
            return rt.Counted.UNKNOWN if manifest.round.number > machine.head.round else known(manifest)

        monkeypatch.setattr(machine, "counted", outlived)
        if not kept:
            monkeypatch.setattr(engine._results, "of_layers", lambda layers: None)
        for name in ("load", "apply", "rebase"):
            order = getattr(made[0].trainer, name)
            monkeypatch.setattr(
                made[0].trainer, name, lambda _order=order, _name=name, **how: (told.append(_name), _order(**how))[1]
            )
        await made[0].rounds(len(made[0].heads) + 3)
        assert len(told) >= 2
        assert set(told) == {"load"}


@pytest.mark.timeout(600)
async def test_an_automatic_codec_follows_the_link(tmp_path):
    slow = asyncio.Event()
    slow.set()

    async def link(passage):
        if slow.is_set() and passage.protocol == AVERAGE and passage.frame.kind is FrameKind.PART:
            await asyncio.sleep(len(passage.frame.body) / 20e3)
        return passage.frame

    async with members(tmp_path, 2, link, codec="auto", round_tokens=30_000) as made:
        ann = made[0]

        async def until_codec(wanted: set[str]) -> None:
            async with asyncio.timeout(TIMEOUT.total_seconds()):
                while not ann.heads or ann.heads[-1].manifest.codec not in {CODECS[name].number for name in wanted}:
                    await ann.rounds(len(ann.heads) + 1)

        await until_codec({"int2"})
        slow.clear()
        await until_codec({"bf16", "int8", "int4"})
