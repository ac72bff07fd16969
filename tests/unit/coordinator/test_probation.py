"""Members on probation at the coordinator: who is, what plans say of it, and what ends it."""

from __future__ import annotations

import random

import pytest
from unit.coordinator.test_training_scores import ALL, audit, audited_rounds, events
from unit.coordinator.world import PROMPT, RUN, SECRET, World, commit, round_report

from atoll.coordinator.live.probation import planned_probation
from atoll.coordinator.planner.plan_builder import RoutePart
from atoll.coordinator.runs import admission, departure
from atoll.coordinator.runs.recovery import newest_held_state, recover
from atoll.coordinator.state.deciding import is_behind
from atoll.coordinator.store.records import Token
from atoll.core.errors import InvalidTransition
from atoll.core.quorum import COORDINATOR
from atoll.core.tokens import hash_secret
from atoll.v1 import manifest_pb2


def strangers_token(world: World) -> Token:
    wanted = admission.TokenRequest("5" * 12, hash_secret(SECRET), "", 100, 10**6, ("node",), on_probation=True)
    world.take(admission.create_token(world.state, world.now, wanted))
    return world.state.tokens[wanted.token_id]


def joined_by_strangers(*names: str, known: tuple[str, ...] = ALL) -> World:
    """A run of known members, and a plan with these strangers too."""
    world = World()
    world.policy = PROMPT
    world.train(*known, stop_tokens=10**12)
    token = strangers_token(world)
    for name in names:
        world.enrol(name, token)
        world.connect(name)
    world.wait(10)
    world.tick()
    world.wait(10)
    world.tick()
    return world


def on_probation(world: World) -> set[str]:
    return {world.name_of(peer) for peer in world.plans[-1].on_probation}


def vouch(world: World, name: str, *, on_probation: bool = False) -> None:
    world.take(admission.set_probation(world.state, world.now, name, on_probation=on_probation))


def settle_plan(world: World) -> None:
    for _ in range(2):
        world.wait(world.policy.reshare_after_seconds + 1)
        world.tick()


def test_a_plan_puts_on_probation_whom_a_token_for_strangers_admitted() -> None:
    world = joined_by_strangers("sue", "tim")
    assert {world.name_of(peer) for peer in world.plans[-1].members} == {*ALL, "sue", "tim"}
    assert on_probation(world) == {"sue", "tim"}


def test_a_run_of_strangers_alone_has_nobody_on_probation() -> None:
    world = World()
    world.create_run()
    token = strangers_token(world)
    for name in ("sue", "tim"):
        world.enrol(name, token)
        world.connect(name)
    assert all(node.on_probation for node in world.state.nodes.values())
    world.wait(0.4)
    world.say(world.name_of(world.state.memory[RUN].genesis_writer), genesis=world.genesis())
    world.wait(1)
    assert world.plans
    assert on_probation(world) == set()


def test_the_first_seats_are_not_for_strangers_while_there_are_others() -> None:
    world = World()
    world.create_run(min_nodes=4)
    token = strangers_token(world)
    for name in ("ann", "bob", "sue", "tim"):
        world.enrol(name, token if name in ("sue", "tim") else None)
        world.connect(name)
    world.wait(0.4)
    world.say(world.name_of(world.state.memory[RUN].genesis_writer), genesis=world.genesis())
    world.wait(1)
    named = {COORDINATOR if seat == COORDINATOR else world.name_of(seat) for seat in world.plans[-1].base.seats}
    assert named == {"ann", "bob", COORDINATOR}


def test_the_operator_vouches_for_a_node_and_puts_one_on_probation() -> None:
    world = joined_by_strangers("sue")
    version = world.plans[-1].version
    vouch(world, "sue")
    vouch(world, "bob", on_probation=True)
    settle_plan(world)
    assert on_probation(world) == {"bob"}
    assert world.plans[-1].version == version + 1
    assert world.plans[-1].reason == "bob on probation; sue on probation no more"
    assert events(world, "node.vouched-for") == ["the operator vouches for sue"]
    assert events(world, "node.on-probation") == ["the operator put bob on probation"]
    vouch(world, "bob", on_probation=True)
    assert len(events(world, "node.on-probation")) == 1
    settle_plan(world)
    assert world.plans[-1].version == version + 1


def test_no_token_changes_whether_a_known_node_is_on_probation() -> None:
    world = joined_by_strangers("sue")
    world.enrol("ann", world.state.tokens["5" * 12])
    assert not world.state.nodes[world.identities["ann"].peer_id].on_probation
    world.enrol("sue", world.token())
    assert world.state.nodes[world.identities["sue"].peer_id].on_probation


def test_one_stage_on_probation_puts_its_whole_route_there() -> None:
    world = joined_by_strangers("sue")
    peer = {name: identity.peer_id for name, identity in world.identities.items()}
    routes = [
        (RoutePart(peer["ann"], 0, 1), RoutePart(peer["sue"], 2, 2)),
        (RoutePart(peer["bob"], 0, 2),),
    ]
    assert planned_probation(world.state, routes, [peer["cid"]]) == {peer["ann"], peer["sue"]}
    assert planned_probation(world.state, routes[:1], [peer["cid"]]) == frozenset()


def told_by(world: World, names: list[str]) -> bool:
    """Whether the coordinator takes a round of these."""
    members = [world.identities[name] for name in names]
    before = world.state.memory[RUN].committed[world.run.head_round]
    number = world.run.head_round + 1
    report = round_report(number, before.manifest_hash, members, plan_version=world.plans[-1].version)
    world.say(world.opener_of(report), rounds=[report])
    return world.run.head_round == number


def told(world: World, change: object = None) -> bool:
    """Whether the coordinator takes a round in which sue is on probation; `change` may alter its manifest."""
    names = [*ALL, "sue"]
    members = [world.identities[name] for name in names]
    before = world.state.memory[RUN].committed[world.run.head_round]
    report = round_report(
        world.run.head_round + 1,
        before.manifest_hash,
        members,
        plan_version=world.plans[-1].version,
        committed_before=world.run.committed_tokens,
        tokens_each=300,
    )
    manifest = manifest_pb2.Manifest.FromString(report.manifest.payload)
    sue = next(it for it in manifest.contributions if it.peer_id == world.identities["sue"].peer_id)
    sue.on_probation, sue.tokens, sue.judged_tokens = True, 0, 300
    manifest.committed_tokens -= 300
    if callable(change):
        change(manifest, sue)
    report.manifest.CopyFrom(commit(manifest.SerializeToString(), [world.identities[name] for name in ALL]))
    head = world.run.head_round
    world.say(world.opener_of(report), rounds=[report])
    return world.run.head_round > head


def claims_tokens(manifest: manifest_pb2.Manifest, sue: manifest_pb2.Contribution) -> None:
    sue.tokens = 300
    manifest.committed_tokens += 300


def is_not_on_probation(manifest: manifest_pb2.Manifest, sue: manifest_pb2.Contribution) -> None:
    sue.on_probation, sue.judged_tokens = False, 0
    claims_tokens(manifest, sue)


def weighs_more(_: manifest_pb2.Manifest, sue: manifest_pb2.Contribution) -> None:
    sue.weight = sue.judged_tokens = 501


@pytest.mark.parametrize("change", [claims_tokens, is_not_on_probation, weighs_more])
def test_a_round_that_gives_a_stranger_more_than_its_plan_allows_is_refused(change: object) -> None:
    world = joined_by_strangers("sue")
    assert told(world)
    assert not told(world, change)
    assert len(events(world, "round.rejected")) == 1
    assert told(world)
    assert world.run.committed_tokens == 2 * 300 * len(ALL)


def audit_all(world: World, rounds: int, cheat: str, seed: int) -> None:
    rng, peer = random.Random(seed), world.identities[cheat].peer_id if cheat else ""
    for _ in range(rounds):
        (drawn,) = audited_rounds(world, 1)
        for name in ALL:  # heartbeats, so that reports have their allowance
            world.say(name)
        world.wait(5)
        audit(world, world.run.head_round, drawn, rng.gauss(0.3 if drawn.contributor == peer else 4.0, 1.1))


def test_audits_put_a_cheat_on_probation_and_the_operator_ends_it() -> None:
    world = World()
    world.train(*ALL, stop_tokens=10**12)
    audit_all(world, 90, "cid", 1)
    assert world.state.nodes[world.identities["cid"].peer_id].on_probation
    (message,) = events(world, "node.training-doubted")
    assert message.endswith("; it is on probation")
    audit_all(world, 120, "", 2)
    (message,) = events(world, "node.proved")
    assert message.startswith("cid, which is on probation, trains what it claims")
    assert world.state.nodes[world.identities["cid"].peer_id].on_probation
    vouch(world, "cid")
    assert not world.state.nodes[world.identities["cid"].peer_id].on_probation


def test_members_on_probation_decide_neither_corpus_nor_genesis() -> None:
    world = World()
    world.create_run(min_nodes=5)
    token = strangers_token(world)
    for name in ("s1", "s2", "s3", "s4", "s5"):
        world.enrol(name, token)
        world.connect(name, corpus="ee" * 32)
    for name in ("ann", "bob"):
        world.enrol(name)
        world.connect(name)
    world.wait(1)
    assert world.run.state == "WAITING"  # two of five have the corpus of those that count
    for name in ("s1", "s2", "s3"):
        world.connect(name)
    world.wait(1)
    assert world.run.state == "GENESIS"
    assert world.name_of(world.state.memory[RUN].genesis_writer) in {"ann", "bob"}


def test_no_member_on_probation_writes_the_genesis_after_the_others_left() -> None:
    world = World()
    world.create_run(min_nodes=1)
    token = strangers_token(world)
    world.join("ann")
    for name in ("s1", "s2"):
        world.enrol(name, token)
        world.connect(name)
    world.wait(1)
    assert world.name_of(world.state.memory[RUN].genesis_writer) == "ann"
    world.take(departure.leave(world.state, world.now, world.identities["ann"].peer_id, ""))
    world.wait(5)
    assert (world.run.state, world.state.memory[RUN].genesis_writer) == ("WAITING", "")
    assert "on probation" in world.state.memory[RUN].no_plan_reason


def test_recovery_does_not_believe_what_members_on_probation_report() -> None:
    world = joined_by_strangers(*(f"s{number}" for number in range(8)))
    assert told_by(world, [*ALL])
    for number in range(8):
        world.heads[f"s{number}"] = (500, b"x" * 32)
        world.say(f"s{number}")
    for name in ALL:
        head = world.state.memory[RUN].committed[world.run.head_round]
        world.heads[name] = (world.run.head_round, head.manifest_hash)
        world.say(name)
    point = newest_held_state(world.state, world.run)
    assert point is not None
    assert point.round == world.run.head_round == 1
    assert not is_behind(world.state, RUN)


def test_a_run_whose_known_nodes_are_away_waits_for_them() -> None:
    world = joined_by_strangers("sue", "tim", known=("ann", "bob"))
    for name in ("ann", "bob"):
        world.hang_up(name)
    world.wait(40)
    assert on_probation(world) == {"sue", "tim"}
    assert {"ann", "bob"} <= {world.name_of(peer) for peer in world.plans[-1].members}  # nobody else may decide
    assert world.state.memory[RUN].undecidable_reason


def test_a_run_whose_known_nodes_are_lost_goes_on_with_a_node_that_the_operator_vouches_for() -> None:
    world = joined_by_strangers("sue", "tim", known=("ann",))
    world.take(departure.leave(world.state, world.now, world.identities["ann"].peer_id, ""))
    settle_plan(world)
    reason = world.state.memory[RUN].undecidable_reason
    assert "Missing: ann" in reason
    assert "`atollctl node vouch` for a node that is there, then `atollctl run recover`" in reason
    with pytest.raises(InvalidTransition):
        recover(world.state, world.now, RUN, force=True)
    vouch(world, "sue")
    head = world.state.memory[RUN].committed[world.run.head_round]
    world.heads["sue"] = (world.run.head_round, head.manifest_hash)
    world.say("sue")
    world.take(recover(world.state, world.now, RUN, force=True))
    settle_plan(world)
    assert on_probation(world) == {"tim"}
    assert not world.state.memory[RUN].undecidable_reason


def test_genesis_says_that_it_waits_for_a_known_node() -> None:
    world = World()
    world.create_run(min_nodes=1)
    world.enrol("ann")  # and is not there
    world.enrol("sue", strangers_token(world))
    world.connect("sue")
    world.wait(1)
    assert world.run.state == "WAITING"
    (told,) = events(world, "plan.impossible")
    assert "genesis waits: all nodes that are there are on probation" in told
    world.connect("ann")
    world.wait(1)
    assert world.run.state == "GENESIS"
    assert not world.state.memory[RUN].no_plan_reason
