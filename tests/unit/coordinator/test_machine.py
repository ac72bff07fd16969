"""What must hold whatever happens in whatever order, restarts included."""

from __future__ import annotations

import hashlib
from contextlib import suppress

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.memory_store import MemoryStore
from unit.coordinator.world import RUN, World, abandoned_report, genesis_report, round_report, spec_toml

from atoll.coordinator.runs import bans, departure, lifecycle, machine, restart
from atoll.coordinator.state.draft import Draft, Step
from atoll.coordinator.state.run_memory import electorate_after
from atoll.coordinator.state.run_states import TRANSITIONS
from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import Event, Run
from atoll.core.errors import AtollError, InvalidRequest, InvalidTransition
from atoll.core.identity import Identity
from atoll.core.plan import Plan
from atoll.core.round_id import RoundId
from atoll.v1 import membership_pb2 as mb

NAMES = ("ann", "bob", "cid")
STATES = st.sampled_from(
    [
        mb.NODE_STATE_JOINING,
        mb.NODE_STATE_READY,
        mb.NODE_STATE_TRAINING,
        mb.NODE_STATE_PAUSED,
        mb.NODE_STATE_FINISHED,
        mb.NODE_STATE_FAILED,
    ]
)


class StoringWorld(World):
    """A world whose steps reach a store, as the controller's do."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.history: list[tuple[str, str]] = []

    def new_identity(self, name: str) -> Identity:
        """The same in every example, so that one can be replayed."""
        return Identity(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest()))

    def take(self, step: Step[object]) -> object:
        before = self.state
        self.store.apply(step.records)
        for plan in step.plans:
            assert not set(plan.members) & step.state.deny.peer_ids, "a banned peer was planned"
            assert plan.members, "an empty plan was issued"
            assert plan.version == max((old.version for old in self.plans), default=0) + 1
        for record in step.records:
            if isinstance(record, Run):
                self.history.append((before.runs[RUN].state if RUN in before.runs else "", record.state))
                before = State(runs={RUN: record})
        return super().take(step)

    def restart(self) -> None:
        """Only what was stored comes back."""
        deny = self.state.deny if self.state.deny.number else None
        old = self.state
        self.state = restart.restore(self.store.load(), tuple(self.plans), deny, self.now, self.operator.public_key)
        self.sessions.clear()
        assert (self.state.nodes, self.state.tokens, self.state.runs) == (old.nodes, old.tokens, old.runs)
        assert self.state.last_event_id == old.last_event_id
        assert self.state.memory[RUN].committed == old.memory[RUN].committed
        assert self.state.memory[RUN].abandoned_attempts == old.memory[RUN].abandoned_attempts
        assert self.state.memory[RUN].plan == old.memory[RUN].plan
        assert self.state.memory[RUN].bases == old.memory[RUN].bases


class Swarm(RuleBasedStateMachine):
    """Operators and nodes doing anything in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = StoringWorld()

    @initialize(training=st.sampled_from([True, True, False]))
    def begin(self, training: bool) -> None:
        if training:
            self.world.train(*NAMES, stop_tokens=6000)
            return
        self.world.create_run(min_nodes=2, stop_tokens=6000)
        for name in NAMES:
            self.world.enrol(name)

    def attempt(self, step: object) -> None:
        """Refusals are fine; what must hold is checked elsewhere."""
        with suppress(AtollError):
            self.world.take(step())  # type: ignore[operator]

    @rule(name=st.sampled_from(NAMES), state=STATES)
    def connect(self, name: str, state: mb.NodeState) -> None:
        try:
            self.world.connect(name, state)
        except AtollError:
            self.world.sessions.pop(self.world.identities[name].peer_id, None)

    @rule()
    def everyone_returns(self) -> None:
        for name in NAMES:
            self.connect(name, mb.NODE_STATE_READY)

    def may_speak(self, name: str) -> bool:
        """Whether its stream is open and the operator has not banned it."""
        peer = self.world.identities[name].peer_id
        live = self.world.state.live.get(peer)
        connected = live is not None and live.connected and live.session == self.world.sessions.get(peer)
        return connected and not self.world.state.nodes[peer].banned

    @rule(name=st.sampled_from(NAMES), state=STATES)
    def say(self, name: str, state: mb.NodeState) -> None:
        if self.may_speak(name):
            self.world.say(name, state)

    @rule(name=st.sampled_from(NAMES))
    def hang_up(self, name: str) -> None:
        if self.may_speak(name):
            self.world.hang_up(name)

    @precondition(lambda self: self.world.run.state == "GENESIS")
    @rule(name=st.sampled_from(NAMES))
    def deliver_genesis(self, name: str) -> None:
        if self.may_speak(name):
            report = genesis_report(self.world.identities[name])
            self.world.say(name, mb.NODE_STATE_READY, genesis=report)

    @precondition(lambda self: self.world.plans)
    @rule(commits=st.booleans(), attempt=st.integers(0, 2))
    def report_round(self, commits: bool, attempt: int) -> None:
        plan = self.world.plans[-1]
        names = [self.world.name_of(peer) for peer in plan.members]
        opener = next((name for name in names if self.may_speak(name)), None)
        if opener is None:
            return
        run, memory = self.world.run, self.world.state.memory[RUN]
        number, tip = run.head_round + 1, memory.committed[run.head_round].manifest_hash
        identities = [self.world.identities[name] for name in names]
        report = abandoned_report(number, plan_version=plan.version, attempt=attempt)
        if commits:
            before = run.committed_tokens
            report = round_report(
                number,
                tip,
                identities,
                plan_version=plan.version,
                tokens_each=min(500, *(item.max_round_tokens for item in plan.assignments)),
                committed_before=before,
                attempt=attempt,
                epoch=plan.base.since_version,
            )
        decides = electorate_after(memory, run.head_round)
        if not commits:
            peer = self.world.opener(RoundId.from_proto(report.round))
            if not peer or not self.may_speak(self.world.name_of(peer)):
                return
            opener = self.world.name_of(peer)
        self.world.say(opener, rounds=[report, report])
        if commits:
            enough = decides is not None and decides.decides(plan.members)
            assert self.world.run.head_round == (number if enough else number - 1)

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        peer = self.world.identities[name].peer_id
        self.attempt(lambda: departure.leave(self.world.state, self.world.now, peer, ""))

    @rule(name=st.sampled_from(NAMES), what=st.sampled_from([departure.drain] * 3 + [bans.ban]))
    def send_away(self, name: str, what: object) -> None:
        extra = ("",) if what is bans.ban else ()
        self.attempt(lambda: what(self.world.state, self.world.now, name, *extra))  # type: ignore[operator]

    @rule(what=st.sampled_from(["start"] * 5 + ["pause"] * 4 + ["stop"]))
    def order(self, what: str) -> None:
        extra = (self.world.policy,) if what == "start" else ()
        self.attempt(lambda: getattr(lifecycle, what)(self.world.state, self.world.now, RUN, *extra))

    @rule(seconds=st.sampled_from([0.2, 1.0, 6.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @invariant()
    def states_move_along_edges(self) -> None:
        for old, new in self.world.history:
            assert old == new or old == "" or new in TRANSITIONS[old]

    @invariant()
    def a_training_run_has_a_plan(self) -> None:
        run = self.world.state.runs.get(RUN)
        if run is not None and run.state in ("TRAINING", "FINISHED"):
            assert run.plan_version == len(self.world.plans) > 0

    @invariant()
    def events_are_numbered_without_gaps(self) -> None:
        events = [record.event_id for record in self.world.records if isinstance(record, Event)]
        assert events == list(range(1, len(events) + 1))


TestSwarm = Swarm.TestCase
TestSwarm.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_tick_without_news_returns_the_same_state() -> None:
    world = World()
    world.train("ann", "bob")
    world.wait(3)
    before = world.state
    world.tick()
    assert world.state is before


def test_a_draft_leaves_the_state_it_began_from_alone() -> None:
    world = World()
    before = world.state
    draft = Draft(before, world.now)
    draft.event("run.created", "reef", "reef", "x")
    lifecycle.create_run(before, world.now, spec_toml(), start=True)
    assert before == State(operator_key=world.operator.public_key)


def test_an_old_stream_may_not_speak_for_the_new_one() -> None:
    world = World()
    world.create_run()
    peer = world.join("ann")[0].peer_id
    old = world.sessions[peer]
    world.connect("ann")
    with pytest.raises(InvalidTransition, match="a newer stream"):
        machine.heartbeat(world.state, world.now, peer, old, mb.HeartbeatRequest())
    world.take(machine.disconnect(world.state, world.now, peer, old))
    assert world.state.live[peer].connected


def test_a_silent_stream_is_over() -> None:
    world = World()
    world.create_run()
    peer = world.join("ann")[0].peer_id
    session = world.sessions.pop(peer)  # it sends nothing any more
    world.wait(world.policy.silence_seconds + 1)
    with pytest.raises(InvalidTransition, match="timed out"):
        machine.check_session(world.state, peer, session)


@pytest.mark.parametrize("address", ["", "no-slash", "/ip4/1 2", "/x" * 200, "/a\n/b"])
def test_addresses_that_are_none_are_refused(address: str) -> None:
    world = World()
    world.create_run()
    world.join("ann")
    with pytest.raises(InvalidRequest):
        world.say("ann", multiaddrs=[address])


@pytest.mark.parametrize("digest", ["ab", "g" * 64, "AB" * 32, "ab" * 33])
def test_a_corpus_digest_is_a_digest(digest: str) -> None:
    world = World()
    world.create_run()
    world.join("ann")
    with pytest.raises(InvalidRequest, match="64 hexadecimal"):
        world.say("ann", corpus_digest=digest)


def test_a_profile_is_bounded_and_printable() -> None:
    world = World()
    world.create_run()
    peer = world.join("ann")[0].peer_id
    profile = mb.NodeProfile(device_name="RTX\x1b]0;owned\x07" + "9" * 10_000, tokens_per_second=-1)
    status = mb.NodeStatus(state=99, detail="a\r\nb")  # type: ignore[arg-type]
    request = mb.HeartbeatRequest(profile=profile, status=status)
    world.take(machine.heartbeat(world.state, world.now, peer, world.sessions[peer], request))
    live = world.state.live[peer]
    assert live.profile.device_name == ("RTX]0;owned" + "9" * 10_000)[:256]
    assert live.profile.tokens_per_second == 0
    assert (live.status.state, live.status.detail) == (mb.NODE_STATE_UNSPECIFIED, "a  b")
    world.wait(2)


def test_heartbeats_write_nothing_when_nothing_durable_changed() -> None:
    world = World()
    world.train("ann", "bob")
    before = len(world.records)
    for _ in range(50):
        world.say("ann", multiaddrs=["/ip4/127.0.0.1/tcp/1"])
    assert len(world.records) == before + 1  # the address, once


def test_after_a_restart_members_have_the_grace_to_come_back() -> None:
    world = StoringWorld()
    world.train("ann", "bob")
    plans: list[Plan] = list(world.plans)
    world.restart()
    world.wait(world.policy.lost_after_seconds - 2)
    world.connect("ann", mb.NODE_STATE_TRAINING)
    world.connect("bob", mb.NODE_STATE_TRAINING)
    world.wait(30)
    assert world.plans == plans
