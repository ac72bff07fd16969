"""Runs that are deleted and nodes that are forgotten: what goes, what stays, and who is refused."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory_store import MemoryStore
from unit.coordinator.world import PROMPT, RUN, World, hash_of, round_report

from atoll.coordinator.runs import (
    admission,
    assignment,
    bans,
    checkpoints,
    deletion,
    departure,
    forgetting,
    identity_rotation,
    lifecycle,
    machine,
    restart,
)
from atoll.coordinator.state import lookup
from atoll.coordinator.state.run_memory import RunMemory
from atoll.coordinator.store.records import OF_RUN, Checkpoint, Event, Node, NodeMetrics, ProofRow
from atoll.core.errors import (
    AtollError,
    Banned,
    CertificateInvalid,
    Forgotten,
    InvalidRequest,
    InvalidTransition,
    NotFound,
)
from atoll.core.identity import Identity
from atoll.core.identity_rotation import sign_rotation, verify_rotation
from atoll.core.manifest import Head
from atoll.core.membership import DenyList
from atoll.core.tokens import hash_secret
from atoll.v1 import membership_pb2 as mb

DAY_MS = 86_400_000


def delete(world: World, run_id: str = RUN) -> deletion.Deletion:
    found = world.take(deletion.delete(world.state, world.now, world.policy, run_id))
    assert isinstance(found, deletion.Deletion)
    return found


def forget(world: World, name: str) -> Node:
    node = world.take(forgetting.forget(world.state, world.now, world.policy, name))
    assert isinstance(node, Node)
    return node


def stop(world: World, run_id: str = RUN) -> None:
    world.take(lifecycle.stop(world.state, world.now, run_id))


def leave(world: World, *names: str) -> None:
    for name in names:
        world.take(departure.leave(world.state, world.now, world.identities[name].peer_id, "stopped"))
        if world.identities[name].peer_id in world.sessions:
            world.hang_up(name)


def rotate(world: World, name: str) -> Identity:
    """The node gets a new identity; the old one."""
    old, new = world.identities[name], Identity.generate()
    rotation = verify_rotation(sign_rotation(old, new, world.operator.public_key), world.operator.public_key)
    world.take(identity_rotation.rotate(world.state, world.now, old.peer_id, rotation))
    world.identities[name] = new
    return old


def deny(world: World) -> DenyList:
    return world.state.deny


def stored(world: World) -> MemoryStore:
    store = MemoryStore()
    store.apply(world.records)
    return store


def check_durable(world: World) -> None:
    """A coordinator that starts now has the same rows."""
    contents = stored(world).load()
    assert {row.run_id: row for row in contents.runs} == world.state.runs
    assert {row.peer_id: row for row in contents.nodes} == world.state.nodes
    assert {row.token_id: row for row in contents.tokens} == world.state.tokens
    assert {row.run_id: row for row in contents.deleted_runs} == world.state.deleted_runs
    assert {row.peer_id: row for row in contents.forgotten_nodes} == world.state.forgotten
    held = {(row.peer_id, row.round): row for row in contents.checkpoints}
    assert held == {(row.peer_id, row.round): row for rows in world.state.checkpoints.values() for row in rows}
    again = restart.restore(contents, tuple(it for it in world.plans if it.run_id in world.state.runs), None, world.now)
    assert again.memory.keys() == world.state.memory.keys() == world.state.runs.keys()


def check_gone(world: World, run_id: str) -> None:
    """No row names the run any more, apart from the event that says so."""
    store = stored(world)
    for record in OF_RUN:
        assert not [row for row in store._rows(record) if vars(row)["run_id"] == run_id], record
    for node in world.state.nodes.values():
        assert run_id not in (node.run_id, node.assigned_run, node.moved_from)


def check_sound(world: World) -> None:
    """Everything in the state belongs to something that exists."""
    state = world.state
    for node in state.nodes.values():
        assert node.run_id in state.runs
        assert node.assigned_run in ("", *state.runs)
        assert node.replaced_by in ("", *state.nodes)
    assert {token.run_id for token in state.tokens.values()} <= state.runs.keys()
    assert state.live.keys() <= state.nodes.keys()
    assert state.checkpoints.keys() <= state.nodes.keys()
    assert not state.forgotten.keys() & state.nodes.keys()
    assert not state.deleted_runs.keys() & state.runs.keys()


# --- runs --------------------------------------------------------------------------------------------


def test_a_deleted_run_leaves_no_row_and_one_event() -> None:
    world = World()
    members = world.train("ann", "bob")
    report = round_report(1, hash_of(world.genesis()), members)
    world.say(world.opener_of(report), rounds=[report])
    info = mb.CheckpointInfo(round=1, manifest_hash=hash_of(report), bytes=5)
    world.say("ann", checkpoints=[info], checkpoints_changed=True)
    proof = ProofRow(RUN, members[0].peer_id, "0" * 16, "double-vote", 1, 1, "it voted twice", b"proof")
    world.records.append(proof)
    world.say("bob", metrics=[mb.NodeMetrics(round=1, train_loss=4.0, seconds=2.0)])
    world.wait(0.4)
    assert any(isinstance(row, NodeMetrics) for row in world.records)
    stop(world)
    leave(world, "ann", "bob")
    found = delete(world)
    assert (found.run.head_round, found.nodes, found.tokens) == (1, 2, 2)
    check_gone(world, RUN)
    check_durable(world)
    (event,) = stored(world)._rows(Event)
    assert (event.kind, event.run_id, event.subject) == ("run.deleted", "", RUN)
    assert event.message == "run reef was deleted at round 1, with 2 nodes and 2 tokens"
    world.restart()
    world.wait(1)
    check_sound(world)


def test_a_run_that_never_started_can_be_deleted() -> None:
    world = World()
    world.create_run(start=False)
    world.enrol("ann")
    delete(world)
    check_gone(world, RUN)
    check_durable(world)


@pytest.mark.parametrize("state", ["WAITING", "GENESIS", "TRAINING", "PAUSED"])
def test_a_run_that_may_go_on_cannot_be_deleted(state: str) -> None:
    world = World()
    world.create_run(start=False)
    world.put(replace(world.run, state=state))
    before = world.state
    with pytest.raises(InvalidTransition, match="only a run that is over") as refused:
        delete(world)
    assert refused.value.remedy == "stop it first: atollctl run stop reef"
    assert world.state == before


@pytest.mark.parametrize("role", ["node", "seed"])
def test_a_run_with_connected_nodes_cannot_be_deleted_and_they_are_named(role: str) -> None:
    world = World()
    world.create_run(start=False)
    world.enrol("ann", world.token(roles=(role,)))
    world.connect("ann")
    stop(world)
    with pytest.raises(InvalidTransition, match=r"are connected: ann$"):
        delete(world)
    world.hang_up("ann")
    with pytest.raises(InvalidTransition, match=r"come back: ann$"):
        delete(world)
    world.wait(PROMPT.lost_after_seconds + 3)
    delete(world)


def test_a_run_is_deleted_once_and_by_its_name() -> None:
    world = World()
    world.create_run(start=False)
    with pytest.raises(InvalidRequest):
        delete(world, "")
    delete(world)
    with pytest.raises(NotFound, match="was deleted"):
        delete(world)
    with pytest.raises(NotFound, match="no run is named"):
        delete(world, "kelp")


def test_a_node_of_a_deleted_run_is_told_what_happened() -> None:
    world = World()
    world.train("ann", "bob")
    stop(world)
    leave(world, "ann", "bob")
    delete(world)
    for _ in range(2):
        with pytest.raises(Forgotten, match="deleted run 'reef'"):
            machine.connect(world.state, world.now, world.identities["ann"].peer_id)
        world.restart()
    with pytest.raises(CertificateInvalid):
        machine.connect(world.state, world.now, Identity.generate().peer_id)


def test_a_ban_outlives_the_run_and_is_told_first() -> None:
    world = World()
    world.train("ann", "bob")
    world.take(bans.ban(world.state, world.now, "ann", "lies"))
    stop(world)
    leave(world, "bob")
    world.hang_up("ann")
    denied = deny(world)
    delete(world)
    assert deny(world) == denied
    ann = world.identities["ann"].peer_id
    assert ann in denied.peer_ids
    with pytest.raises(Banned):
        machine.connect(world.state, world.now, ann)
    world.create_run()
    with pytest.raises(Banned):
        world.enrol("ann")
    world.take(bans.unban(world.state, world.now, ann))
    world.enrol("ann")


def test_a_node_that_moved_on_stays_and_forgets_where_it_was() -> None:
    world = World()
    world.train("ann", "bob")
    world.create_run(name="kelp")
    old = rotate(world, "ann")
    world.take(assignment.assign(world.state, world.now, "ann", "kelp"))
    world.take(assignment.move(world.state, world.now, world.identities["ann"].peer_id))
    stop(world)
    leave(world, "bob")
    assert delete(world).nodes == 1
    check_gone(world, RUN)
    check_durable(world)
    check_sound(world)
    assert lookup.node(world.state, old.peer_id).name == "ann"
    world.connect("ann")
    world.wait(1)


def test_a_node_that_was_to_come_stays_where_it_is() -> None:
    world = World()
    world.train("ann", "bob")
    world.create_run(name="kelp", start=False)
    world.take(assignment.assign(world.state, world.now, "ann", "kelp"))
    delete(world, "kelp")
    node = lookup.node(world.state, "ann")
    assert (node.assigned_run, node.draining) == ("", False)
    assert world.take(assignment.move(world.state, world.now, node.peer_id)).run_id == RUN  # type: ignore[attr-defined]
    messages = [row.message for row in world.records if isinstance(row, Event) and row.kind == "node.assigned"]
    assert messages[-1] == "ann stays in run reef: run kelp was deleted"


def test_old_identities_of_its_nodes_go_with_them_also_those_from_before_they_came() -> None:
    world = World()
    world.create_run(start=False, name="kelp")
    world.enrol("ann")
    old = rotate(world, "ann")
    world.create_run(start=False)
    world.take(assignment.assign(world.state, world.now, "ann", RUN))
    world.take(assignment.move(world.state, world.now, world.identities["ann"].peer_id))
    assert delete(world).nodes == 1
    assert not world.state.nodes
    check_durable(world)
    assert old.peer_id in deny(world).peer_ids


def test_a_run_of_a_deleted_name_has_newer_plans_and_old_manifests_are_void() -> None:
    world = World()
    members = world.train("ann", "bob")
    old_plan = world.plans[-1]
    old_genesis = hash_of(world.genesis())
    old = round_report(1, old_genesis, members)
    world.say(world.opener_of(old), rounds=[old])
    assert world.run.head_round == 1
    stop(world)
    leave(world, "ann", "bob")
    delete(world)
    world.restart()

    members = world.train("ann", "bob")
    plan = world.plans[-1]
    assert plan.version > old_plan.version
    assert plan.base.since_version > old_plan.base.since_version
    assert not plan.accepts(_head(old))
    version = plan.version
    world.say(world.name_of(members[0].peer_id), rounds=[old])  # what a node says that kept the old state
    assert world.run.head_round == 0
    new = round_report(1, hash_of(world.genesis()), members, plan_version=version, epoch=plan.base.since_version)
    world.say(world.opener_of(new), rounds=[new])
    assert world.run.head_round == 1
    assert plan.accepts(_head(new))
    world.restart()
    assert world.state.memory[RUN].committed[1].manifest_hash == hash_of(new)


def _head(report: mb.RoundReport) -> Head:
    return Head(report.manifest)


def test_a_name_that_is_used_again_and_again_keeps_the_highest_plan() -> None:
    world = World()
    versions = []
    for _ in range(3):
        world.create_run(start=False)
        world.put(replace(world.run, plan_version=max(world.run.plans_before, world.run.plan_version) + 2))
        versions.append(world.run.plan_version)
        delete(world)
        assert world.state.deleted_runs[RUN].plan_version == versions[-1]
    assert versions == [2, 4, 6]
    world.create_run(start=False)
    delete(world)  # without any plan
    assert world.state.deleted_runs[RUN].plan_version == 6


def test_names_of_deleted_runs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "KEPT_DELETED_RUNS", 2)
    world = World()
    for name in ("dune", "kelp", "reef"):
        world.create_run(start=False, name=name)
        delete(world, name)
        world.wait(0.2)
    assert set(world.state.deleted_runs) == {"kelp", "reef"}
    check_durable(world)


# --- nodes -------------------------------------------------------------------------------------------


def lose(world: World, name: str) -> None:
    world.hang_up(name)
    world.wait(PROMPT.lost_after_seconds + 3)


def commit(world: World, members: list[Identity]) -> None:
    """A round of the newest plan, after genesis."""
    report = round_report(1, hash_of(world.genesis()), members, plan_version=world.plans[-1].version)
    world.say(world.opener_of(report), rounds=[report])
    assert world.run.head_round == 1


def without_cid() -> World:
    """A run in which a plan and a round came without a node that was lost."""
    world = World()
    world.train("ann", "bob", "cid")
    lose(world, "cid")
    commit(world, [world.identities["ann"], world.identities["bob"]])
    return world


def test_a_lost_node_is_forgotten_and_its_rounds_stay() -> None:
    world = World()
    members = world.train("ann", "bob", "cid")
    cid = world.identities["cid"].peer_id
    commit(world, members)
    lose(world, "cid")
    report = round_report(
        2,
        world.state.memory[RUN].committed[1].manifest_hash,
        [it for it in members if it.peer_id != cid],
        plan_version=world.plans[-1].version,
        committed_before=world.run.committed_tokens,
    )
    world.say(world.opener_of(report), rounds=[report])
    tokens = world.run.committed_tokens
    node = forget(world, "cid")
    assert (node.peer_id, node.name) == (cid, "cid")
    assert cid not in world.state.nodes
    assert world.run.committed_tokens == tokens
    assert cid in world.state.memory[RUN].committed[1].present
    check_durable(world)
    check_sound(world)
    for item in fields(RunMemory):
        held = getattr(world.state.memory[RUN], item.name)
        assert not (isinstance(held, dict) and cid in held), item.name
    world.wait(1)
    world.restart()
    world.wait(1)


def test_a_forgotten_node_is_refused_until_it_joins_again_under_its_name() -> None:
    world = without_cid()
    cid = world.identities["cid"].peer_id
    epoch = forget(world, "cid").epoch
    for _ in range(2):
        with pytest.raises(Forgotten, match="removed this node from run 'reef'") as refused:
            machine.connect(world.state, world.now, cid)
        assert "atoll join" in refused.value.remedy
        world.restart()
    world.enrol("cid")
    node = lookup.node(world.state, "cid")
    assert (node.peer_id, node.name, node.epoch) == (cid, "cid", epoch + 1)
    assert not world.state.forgotten
    world.connect("cid")
    check_durable(world)


def test_why_a_node_is_refused_is_kept_as_long_as_its_certificates_are_valid() -> None:
    world = without_cid()
    forget(world, "cid")
    world.now = replace(world.now, unix_ms=world.now.unix_ms + 4 * DAY_MS)
    world.tick()
    assert world.state.forgotten
    world.now = replace(world.now, unix_ms=world.now.unix_ms + DAY_MS // 10)
    world.tick()
    assert not world.state.forgotten
    check_durable(world)


def test_a_node_that_is_there_or_was_a_moment_ago_is_not_forgotten() -> None:
    world = without_cid()
    world.connect("cid")
    with pytest.raises(InvalidTransition, match="is connected"):
        forget(world, "cid")
    world.hang_up("cid")
    with pytest.raises(InvalidTransition, match="may come back"):
        forget(world, "cid")


def test_a_node_with_a_place_in_the_plan_is_not_forgotten_unless_the_run_is_over() -> None:
    world = World()
    world.train("ann", "bob")
    world.take(lifecycle.pause(world.state, world.now, RUN))
    lose(world, "bob")
    with pytest.raises(InvalidTransition, match="has a place in plan 1 of run reef"):
        forget(world, "bob")
    stop(world)
    forget(world, "bob")
    world.wait(1)
    world.restart()  # the plan of the stopped run still names it
    world.wait(PROMPT.lost_after_seconds + 3)
    check_sound(world)
    world.enrol("bob")
    assert lookup.node(world.state, "bob").name == "bob"


def test_a_node_whose_vote_may_decide_the_next_round_is_not_forgotten() -> None:
    world = World()
    members = world.train("ann", "bob", "cid")
    commit(world, members)
    lose(world, "cid")
    assert "cid" not in world.members()
    with pytest.raises(InvalidTransition, match="has a seat in round 2 of run reef"):
        forget(world, "cid")


def test_a_place_in_a_run_that_the_node_left_for_another_one_counts_too() -> None:
    world = World()
    world.train("ann", "bob")
    world.create_run(name="kelp")
    world.take(lifecycle.pause(world.state, world.now, RUN))
    world.take(assignment.assign(world.state, world.now, "bob", "kelp"))
    world.take(assignment.move(world.state, world.now, world.identities["bob"].peer_id))
    with pytest.raises(InvalidTransition, match="of run reef"):
        forget(world, "bob")


def test_a_place_under_an_earlier_identity_counts_too() -> None:
    world = World()
    world.train("ann", "bob")
    rotate(world, "bob")
    with pytest.raises(InvalidTransition, match="bob has a place in plan 1 of run reef"):
        forget(world, "bob")


def test_a_run_is_not_deleted_while_another_one_needs_a_node_that_moved_to_it() -> None:
    world = World()
    world.train("ann", "bob")
    world.create_run(name="kelp", start=False)
    world.take(lifecycle.pause(world.state, world.now, RUN))
    world.take(assignment.assign(world.state, world.now, "bob", "kelp"))
    world.take(assignment.move(world.state, world.now, world.identities["bob"].peer_id))
    with pytest.raises(InvalidTransition, match="bob has a place in plan 1 of run reef"):
        delete(world, "kelp")
    stop(world)
    delete(world, "kelp")
    world.wait(1)
    world.restart()
    world.wait(1)
    check_sound(world)


def test_a_banned_node_is_forgotten_and_stays_banned() -> None:
    world = without_cid()
    world.take(bans.ban(world.state, world.now, "cid", "lies"))
    denied, cid = deny(world), world.identities["cid"].peer_id
    assert forget(world, "cid").banned
    assert deny(world) == denied
    for refused in (lambda: machine.connect(world.state, world.now, cid), lambda: world.enrol("cid")):
        with pytest.raises(Banned):
            refused()
    world.take(bans.unban(world.state, world.now, cid))
    with pytest.raises(Forgotten):
        machine.connect(world.state, world.now, cid)
    world.enrol("cid")


def test_a_node_is_forgotten_under_all_identities_that_it_had() -> None:
    world = without_cid()
    old = rotate(world, "cid")
    forget(world, "cid")
    assert not {old.peer_id, world.identities["cid"].peer_id} & world.state.nodes.keys()
    check_durable(world)
    check_sound(world)
    assert lookup.run(world.state, RUN)
    with pytest.raises(NotFound):
        forget(world, "cid")


def test_genesis_does_not_wait_for_a_writer_that_was_forgotten() -> None:
    world = World()
    world.create_run(min_nodes=2)
    world.join("ann", "bob", "cid")
    world.wait(0.4)
    writer = world.name_of(world.state.memory[RUN].genesis_writer)
    leave(world, writer)
    forget(world, writer)
    world.wait(1)
    assert world.state.memory[RUN].genesis_writer in {it.peer_id for it in world.identities.values()}
    assert world.name_of(world.state.memory[RUN].genesis_writer) != writer


def test_records_of_its_checkpoints_go_with_a_node() -> None:
    world = without_cid()
    cid = world.identities["cid"].peer_id
    world.connect("cid")
    world.say(
        "cid", checkpoints=[mb.CheckpointInfo(round=1, manifest_hash=b"h" * 32, bytes=5)], checkpoints_changed=True
    )
    leave(world, "cid")
    world.wait(3)
    assert checkpoints.checkpoints_of_run(world.state, RUN)
    world.take(lifecycle.stop(world.state, world.now, RUN))
    forget(world, "cid")
    assert not checkpoints.checkpoints_of_run(world.state, RUN)
    assert not [row for row in stored(world)._rows(Checkpoint) if row.peer_id == cid]


# --- any order of everything -------------------------------------------------------------------------

NAMES = st.sampled_from(["ann", "bob", "cid"])
RUNS = st.sampled_from(["reef", "kelp"])
STEPS = st.one_of(
    st.tuples(st.just("create"), RUNS),
    st.tuples(st.just("start"), RUNS),
    st.tuples(st.just("stop"), RUNS),
    st.tuples(st.just("delete"), RUNS),
    st.tuples(st.just("enrol"), NAMES, RUNS),
    st.tuples(st.just("connect"), NAMES),
    st.tuples(st.just("hang-up"), NAMES),
    st.tuples(st.just("leave"), NAMES),
    st.tuples(st.just("assign"), NAMES, RUNS),
    st.tuples(st.just("move"), NAMES),
    st.tuples(st.just("rotate"), NAMES),
    st.tuples(st.just("ban"), NAMES),
    st.tuples(st.just("forget"), NAMES),
    st.tuples(st.just("wait"), st.sampled_from([0.4, 25.0])),
    st.tuples(st.just("restart")),
)


ABOUT_KNOWN = ("connect", "hang-up", "leave", "assign", "move", "rotate", "ban", "forget")


class Story(World):
    """A world in which anybody may do anything; what is refused changes nothing."""

    def act(self, what: str, *about: object) -> None:
        before, records = self.state, len(self.records)
        name = str(about[0]) if about else ""
        peer = self.identities[name].peer_id if name in self.identities else ""
        if (what in ABOUT_KNOWN and not peer) or (what == "hang-up" and peer not in self.sessions):
            return
        try:
            self._act(what, *map(str, about))
        except AtollError:
            assert (self.state, len(self.records)) == (before, records)

    def _act(self, what: str, *about: str) -> None:
        state, now = self.state, self.now
        match what:
            case "create":
                self.create_run(name=about[0], start=False)
            case "start":
                self.take(lifecycle.start(state, now, about[0], self.policy))
            case "stop":
                self.take(lifecycle.stop(state, now, about[0]))
            case "delete":
                self.take(deletion.delete(state, now, self.policy, about[0]))
                check_gone(self, about[0])
            case "enrol":
                wanted = admission.TokenRequest(f"{now.unix_ms:012d}", self._hash(), about[1], 1, 60, ("node",))
                token = admission.create_token(state, now, wanted)
                identity = self.identities.setdefault(about[0], Identity.generate())
                applicant = admission.Applicant(
                    token.result.token_id, "5" * 48, identity.peer_id, identity.public_key, about[0]
                )
                enrolled = admission.enrol(token.state, now, applicant)
                self.take(token)
                self.take(enrolled)
            case "connect":
                self.connect(about[0])
            case "hang-up":
                self.hang_up(about[0])
            case "leave":
                self.take(departure.leave(state, now, self.identities[about[0]].peer_id, "stopped"))
            case "assign":
                self.take(assignment.assign(state, now, self.identities[about[0]].peer_id, about[1]))
            case "move":
                self.take(assignment.move(state, now, self.identities[about[0]].peer_id))
            case "rotate":
                rotate(self, about[0])
            case "ban":
                self.take(bans.ban(state, now, self.identities[about[0]].peer_id, ""))
            case "forget":
                self.take(forgetting.forget(state, now, self.policy, self.identities[about[0]].peer_id))
            case "wait":
                self.wait(float(about[0]))
            case "restart":
                denied = self.state.deny
                self.restart()
                self.state = replace(self.state, deny=denied)  # the signed list is stored by the controller

    def _hash(self) -> str:
        return hash_secret("5" * 48)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=40), st.booleans())
def test_nothing_is_left_dangling_whatever_happens_in_whatever_order(
    steps: list[tuple[object, ...]], trains: bool
) -> None:
    story = Story()
    if trains:
        story.train("ann", "bob", "cid")
    else:
        story.create_run(start=False)
    for what, *about in steps:
        banned = story.state.deny.peer_ids
        story.now = replace(story.now, unix_ms=story.now.unix_ms + 1)
        story.act(str(what), *about)
        check_sound(story)
        assert story.state.deny.peer_ids >= banned
    check_durable(story)
