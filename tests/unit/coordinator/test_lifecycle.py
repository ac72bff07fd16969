"""From created to finished: when genesis begins, whom plans name, and what the operator may order."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.coordinator.world import CORPUS, RUN, World, genesis_report, round_report, spec_toml

from atoll.coordinator.live.attendance import DRAIN_SECONDS, corpus_notice, ready_count
from atoll.coordinator.runs import bans, departure, lifecycle, machine
from atoll.coordinator.services import views
from atoll.coordinator.state import lookup
from atoll.coordinator.state.run_states import TRANSITIONS
from atoll.coordinator.state.snapshot import Policy
from atoll.coordinator.store.records import Node, Run
from atoll.core.data_position import first_lease_samples
from atoll.core.errors import AlreadyExists, Ambiguous, CorpusError, InvalidTransition, NotFound, RunSpecError
from atoll.core.manifest import manifest_hash
from atoll.core.run_spec import parse_run_spec
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb


def order(world: World, name: str) -> mb.Order:
    return views.order_for(world.state, world.state.nodes[world.identities[name].peer_id])


# --- runs and their orders -------------------------------------------------------------------------


def test_a_wrong_spec_names_every_wrong_key() -> None:
    world = World()
    text = spec_toml().replace("min_nodes = 2", "min_nodes = 0\ncolour = 1") + "momentum = 2\n"
    with pytest.raises(RunSpecError) as wrong:
        lifecycle.create_run(world.state, world.now, text, start=False)
    for key in ("run.min_nodes", "run.colour", "sync.momentum"):
        assert key in str(wrong.value)


@pytest.mark.parametrize(
    "line",
    [
        "round_max_seconds = 1e300",
        "round_max_seconds = nan",
        "round_max_seconds = 100000",
        'round_max_seconds = "P9D"',
        "part_elements = 2097152",
        "outer_warmup_tokens = 9007199254740993",
        "outer_warmup_tokens = " + "9" * 5000,
        "outer_warmup_tokens = " + "[" * 100_000,
    ],
)
def test_numbers_beyond_reason_are_refused_in_a_sentence(line: str) -> None:
    world = World()
    with pytest.raises(RunSpecError):
        lifecycle.create_run(world.state, world.now, spec_toml() + line, start=False)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_stored_spec_parses_to_the_same_spec(path: str) -> None:
    world = World()
    text = spec_toml().replace('"corpus"', json.dumps(path, ensure_ascii=False).replace("\x7f", "\\u007f"))
    run = world.take(lifecycle.create_run(world.state, world.now, text, start=False))
    assert isinstance(run, Run)
    assert parse_run_spec(run.spec_toml).data.path == path


def test_names_of_runs_are_taken_once() -> None:
    world = World()
    world.create_run()
    with pytest.raises(AlreadyExists):
        world.create_run()


def test_the_only_run_needs_no_name_and_two_do() -> None:
    world = World()
    with pytest.raises(NotFound):
        lookup.run(world.state, "")
    world.create_run()
    assert lookup.run(world.state, "").run_id == RUN
    world.take(lifecycle.create_run(world.state, world.now, spec_toml(name="atoll-2"), start=False))
    with pytest.raises(Ambiguous, match="there are 2 runs: atoll-2, reef"):
        lookup.run(world.state, "")
    world.take(lifecycle.stop(world.state, world.now, "atoll-2"))
    assert lookup.run(world.state, "").run_id == RUN  # the only one that is not over
    world.take(lifecycle.stop(world.state, world.now, RUN))
    with pytest.raises(Ambiguous, match="atoll-2, reef"):
        lookup.run(world.state, "")


def test_impossible_orders_name_the_possible_ones() -> None:
    world = World()
    world.create_run(start=False)
    with pytest.raises(InvalidTransition, match="is created: it cannot become paused") as refusal:
        lifecycle.pause(world.state, world.now, "")
    assert refusal.value.remedy == "from here it can become: stopped, waiting"
    world.take(lifecycle.stop(world.state, world.now, ""))
    with pytest.raises(InvalidTransition):
        lifecycle.start(world.state, world.now, "", world.policy)


def test_ends_are_ends() -> None:
    assert {state for state, targets in TRANSITIONS.items() if not targets} == {"FINISHED", "STOPPED"}


# --- genesis ---------------------------------------------------------------------------------------


def test_genesis_waits_for_enough_nodes_and_picks_the_lowest_peer() -> None:
    world = World()
    world.create_run(min_nodes=2)
    world.join("ann")
    world.wait(2)
    assert world.run.state == "WAITING"
    world.join("bob")
    world.wait(0.2)
    assert world.run.state == "GENESIS"
    writer = world.state.memory[RUN].genesis_writer
    assert writer == min(identity.peer_id for identity in world.identities.values())
    orders = {name: order(world, name) for name in ("ann", "bob")}
    assert orders[world.name_of(writer)] == mb.ORDER_WRITE_GENESIS
    assert sorted(orders.values()) == [mb.ORDER_UNSPECIFIED, mb.ORDER_WRITE_GENESIS]


def test_nodes_that_are_not_ready_do_not_count() -> None:
    world = World()
    world.create_run(min_nodes=1)
    world.enrol("ann")
    world.connect("ann", mb.NODE_STATE_JOINING)
    world.wait(1)
    assert world.run.state == "WAITING"
    world.say("ann", mb.NODE_STATE_READY)
    world.wait(0.2)
    assert world.run.state == "GENESIS"


def test_a_created_run_does_not_begin_by_itself() -> None:
    world = World()
    world.create_run(min_nodes=1, start=False)  # type: ignore[arg-type]
    world.join("ann")
    world.wait(5)
    assert world.run.state == "CREATED"


def test_plan_one_has_everyone_equal_ranges_and_the_lineage() -> None:
    world = World()
    members = world.train("ann", "bob", "cid")
    plan = world.plans[-1]
    each = first_lease_samples(16, 3)  # ⌈1000 / 64⌉ samples in a round
    assert plan.version == 1
    assert [item.data_ranges for item in plan.assignments] == [((i * each, (i + 1) * each),) for i in range(3)]
    assert [item.peer_id for item in plan.assignments] == sorted(member.peer_id for member in members)
    assert {(item.first_layer, item.last_layer) for item in plan.assignments} == {(0, 2)}
    genesis = manifest_pb2.CommittedManifest.FromString(world.run.genesis)
    assert plan.base.manifest_hash == manifest_hash(genesis.payload)


def test_when_the_writer_is_lost_another_one_writes() -> None:
    world = World()
    world.create_run(min_nodes=2)
    world.join("ann", "bob", "cid")
    world.wait(0.4)
    first = world.state.memory[RUN].genesis_writer
    world.hang_up(world.name_of(first))
    world.wait(world.policy.lost_after_seconds + 1)
    second = world.state.memory[RUN].genesis_writer
    assert (world.run.state, second != first) == ("GENESIS", True)
    assert order(world, world.name_of(second)) == mb.ORDER_WRITE_GENESIS


def test_when_too_few_remain_the_run_waits_again() -> None:
    world = World()
    world.create_run(min_nodes=2)
    world.join("ann", "bob")
    world.wait(0.4)
    world.take(departure.leave(world.state, world.now, world.state.memory[RUN].genesis_writer, ""))
    world.wait(0.4)
    assert world.run.state == "WAITING"
    assert world.run.corpus_digest == ""


def test_a_writer_that_never_delivers_is_passed_over() -> None:
    world = World(policy=Policy(genesis_seconds=5))
    world.create_run(min_nodes=2)
    world.join("ann", "bob")
    world.wait(0.4)
    first = world.state.memory[RUN].genesis_writer
    world.wait(5.4)
    assert world.state.memory[RUN].genesis_writer != first


def test_only_the_chosen_writer_is_heard() -> None:
    world = World()
    world.create_run(min_nodes=2)
    world.join("ann", "bob")
    world.wait(0.4)
    other = next(n for n in ("ann", "bob") if world.identities[n].peer_id != world.state.memory[RUN].genesis_writer)
    world.say(other, mb.NODE_STATE_READY, genesis=genesis_report(world.identities[other]))
    assert world.run.state == "GENESIS"


# --- corpora ---------------------------------------------------------------------------------------


def test_the_corpus_most_nodes_have_is_the_runs() -> None:
    world = World()
    world.create_run(min_nodes=2)
    for name, corpus in (("stray", "cd" * 32), ("ann", CORPUS), ("bob", CORPUS)):
        world.enrol(name)
        world.connect(name, corpus=corpus)
    world.wait(0.4)
    assert world.run.corpus_digest == CORPUS
    stray = world.identities["stray"].peer_id
    assert world.kinds().count("node.corpus-differs") == 1
    with pytest.raises(CorpusError, match="is not the run's"):
        machine.check_session(world.state, stray, world.sessions[stray])


def test_who_is_here_and_does_not_count_is_told_with_the_reason() -> None:
    world = World()
    world.create_run(min_nodes=5)
    for name in ("ann", "bob", "cid", "dan", "eve", "fay", "gus"):
        world.enrol(name)
    for name in ("ann", "bob"):
        world.connect(name)
    world.connect("cid", corpus="cd" * 32)
    world.connect("dan", mb.NODE_STATE_JOINING)
    world.connect("eve")
    world.connect("gus", corpus="")
    world.take(departure.drain(world.state, world.now, "eve"))
    view = views.run_view(world.state, world.run, world.now.unix_ms)  # fay never came: nobody is told of those
    assert view.nodes_ready == 2
    assert list(view.uncounted) == [
        "cid has another corpus",
        "dan is joining",
        "eve drains",
        "gus has not reported its corpus digest yet",
    ]


def test_different_corpora_never_add_up_to_genesis() -> None:
    world = World()
    world.create_run(min_nodes=2)
    for name, corpus in (("ann", CORPUS), ("bob", "cd" * 32)):
        world.enrol(name)
        world.connect(name, corpus=corpus)
    world.wait(5)
    assert world.run.state == "WAITING"
    assert ready_count(world.state, RUN) == 1
    assert world.kinds().count("node.corpus-differs") == 1


def test_before_genesis_a_node_with_another_text_than_most_is_told_so_and_nobody_else() -> None:
    world = World()
    world.create_run(min_nodes=3)

    def join(name: str, corpus: str) -> None:
        world.enrol(name)
        world.connect(name, corpus=corpus)
        world.wait(0.4)

    def told() -> set[str]:
        nodes = world.state.nodes.values()
        assert all(corpus_notice(world.state, node) in ("", notice(node)) for node in nodes)
        return {node.name for node in nodes if corpus_notice(world.state, node)}

    def notice(node: Node) -> str:
        others = {CORPUS, "cd" * 32} - {own := world.state.live[node.peer_id].corpus_digest}
        return (
            f"its corpus ({own[:12]}…) differs from that of most nodes ({others.pop()[:12]}…): "
            "the node does not count as ready"
        )

    join("ann", CORPUS)
    assert told() == set()
    join("bob", "cd" * 32)
    assert len(told()) == 1
    join("cleo", "cd" * 32)
    assert told() == {"ann"}
    join("dan", CORPUS)
    join("eve", CORPUS)  # enough for genesis: the others' streams end
    assert world.run.corpus_digest == CORPUS
    assert told() == set()


@pytest.mark.parametrize("state", ["WAITING", "GENESIS", "TRAINING"])
def test_only_created_and_paused_runs_can_be_started(state: str) -> None:
    world = World()
    if state == "TRAINING":
        world.train("ann", "bob")
    else:
        world.create_run(min_nodes=1)
    if state == "GENESIS":
        world.join("ann")
        world.wait(0.4)
    assert world.run.state == state
    with pytest.raises(InvalidTransition, match="only a created or paused run"):
        lifecycle.start(world.state, world.now, "", world.policy)


# --- plans -----------------------------------------------------------------------------------------


def test_joins_in_a_burst_make_one_plan() -> None:
    world = World()
    world.train("ann", "bob")
    world.join("cid")
    world.wait(0.4)
    world.join("dan")
    world.wait(2)
    assert [plan.version for plan in world.plans] == [1, 2]
    assert world.members() == {"ann", "bob", "cid", "dan"}
    assert world.plans[-1].reason in ("cid joins; dan joins", "dan joins; cid joins")


def test_until_a_round_commits_who_stays_keeps_its_samples_and_newcomers_get_the_next() -> None:
    world = World()
    world.train("ann", "bob")
    end, lease = 2 * first_lease_samples(16, 2), first_lease_samples(16, 3)
    world.join("cid")
    world.wait(2)
    gone = world.name_of(world.plans[0].members[0])
    world.say(gone, mb.NODE_STATE_FAILED)
    world.wait(2)
    world.join("dan")
    world.wait(2)
    plans = [{item.peer_id: item.data_ranges for item in plan.assignments} for plan in world.plans]
    assert [len(plan) for plan in plans] == [2, 3, 2, 3]
    cid, dan = (world.identities[name].peer_id for name in ("cid", "dan"))
    assert plans[1] == {**plans[0], cid: ((end, end + lease),)}
    assert plans[2] == {peer: ranges for peer, ranges in plans[1].items() if world.name_of(peer) != gone}
    assert plans[3] == {**plans[2], dan: ((end + lease, end + 2 * lease),)}


def test_once_a_round_has_committed_plans_leave_the_samples_to_manifests() -> None:
    world = World()
    members = world.train("ann", "bob")
    genesis = world.plans[-1].base.manifest_hash
    world.say("ann", rounds=[round_report(1, genesis, members)])
    world.join("cid")
    world.wait(2)
    assert len(world.members()) == 3
    assert all(item.data_ranges == () for item in world.plans[-1].assignments)


@pytest.mark.parametrize("state", [mb.NODE_STATE_DRAINING, mb.NODE_STATE_FAILED, mb.NODE_STATE_JOINING])
def test_a_node_that_cannot_train_leaves_the_plan(state: mb.NodeState) -> None:
    world = World()
    world.train("ann", "bob")
    world.say("bob", state)
    world.wait(1.6)
    assert world.members() == {"ann"}
    world.say("bob", mb.NODE_STATE_READY)
    world.wait(1.6)
    assert world.members() == {"ann", "bob"}


def test_a_blink_changes_nothing() -> None:
    world = World()
    world.train("ann", "bob")
    world.hang_up("bob")
    world.wait(world.policy.lost_after_seconds - 1)
    world.connect("bob", mb.NODE_STATE_TRAINING)
    world.wait(3)
    assert len(world.plans) == 1
    assert "node.lost" not in world.kinds()


def test_a_lost_node_leaves_the_plan_and_is_named_once() -> None:
    world = World()
    world.train("ann", "bob")
    world.hang_up("bob")
    world.wait(world.policy.lost_after_seconds + 2)
    assert world.members() == {"ann"}
    assert world.plans[-1].reason == "bob was lost"
    world.wait(30)
    assert world.kinds().count("node.lost") == 1


def test_when_all_are_gone_the_last_plan_stands() -> None:
    world = World()
    world.train("ann", "bob")
    for name in ("ann", "bob"):
        world.hang_up(name)
    world.wait(60)
    assert len(world.plans) == 1


@pytest.mark.parametrize("how", ["drain", "ban", "leave"])
def test_who_must_go_is_out_of_the_next_plan(how: str) -> None:
    world = World()
    world.train("ann", "bob")
    peer = world.identities["bob"].peer_id
    if how == "drain":
        world.take(departure.drain(world.state, world.now, "bob"))
        assert order(world, "bob") == mb.ORDER_DRAIN
        world.say("bob", mb.NODE_STATE_DRAINING)
    elif how == "ban":
        world.take(bans.ban(world.state, world.now, "bob", "garbage"))
    else:
        world.take(departure.leave(world.state, world.now, peer, "bye"))
    world.wait(1.6)
    assert world.members() == {"ann"}


def test_a_drained_node_is_planned_until_it_has_finished_its_round() -> None:
    world = World()
    world.train("ann", "bob")
    world.take(departure.drain(world.state, world.now, "bob"))
    world.wait(DRAIN_SECONDS - 5)
    assert len(world.plans) == 1
    world.say("bob", mb.NODE_STATE_DRAINING)
    world.wait(1.6)
    assert world.members() == {"ann"}
    assert world.plans[-1].reason == "bob drains"


def test_a_drained_node_that_never_leaves_is_dropped() -> None:
    world = World()
    world.train("ann", "bob")
    world.take(departure.drain(world.state, world.now, "bob"))
    world.wait(30)
    world.connect("bob", mb.NODE_STATE_TRAINING)  # a new stream is no new patience
    world.wait(DRAIN_SECONDS - 30 + 1.6)
    assert world.members() == {"ann"}


def test_a_drained_node_that_was_not_planned_is_not_planned_any_more() -> None:
    world = World()
    world.train("ann", "bob")
    world.enrol("cid")
    world.take(departure.drain(world.state, world.now, "cid"))
    world.connect("cid")
    world.wait(3)
    assert world.members() == {"ann", "bob"}


def test_a_node_that_left_may_come_back_with_its_certificate() -> None:
    world = World()
    world.train("ann", "bob")
    world.take(departure.drain(world.state, world.now, "bob"))
    world.take(departure.leave(world.state, world.now, world.identities["bob"].peer_id, ""))
    world.hang_up("bob")
    world.wait(2)
    assert world.members() == {"ann"}
    world.connect("bob")
    world.wait(2)
    assert world.members() == {"ann", "bob"}


def test_nothing_is_planned_while_paused_and_nodes_get_time_to_resume() -> None:
    world = World()
    world.train("ann", "bob")
    world.take(lifecycle.pause(world.state, world.now, ""))
    for name in ("ann", "bob"):
        world.say(name, mb.NODE_STATE_PAUSED)
    world.wait(30)
    world.take(lifecycle.start(world.state, world.now, "", world.policy))
    assert world.run.state == "TRAINING"
    world.wait(3)
    world.say("ann")
    world.wait(1)
    world.say("bob")
    world.wait(10)
    assert len(world.plans) == 1


def test_a_run_paused_before_genesis_waits_again_when_started() -> None:
    world = World()
    world.create_run()
    world.take(lifecycle.pause(world.state, world.now, ""))
    world.take(lifecycle.start(world.state, world.now, "", world.policy))
    assert world.run.state == "WAITING"


def test_a_node_that_finished_early_does_not_shake_the_plan() -> None:
    world = World()
    world.train("ann", "bob")
    world.say("bob", mb.NODE_STATE_FINISHED)
    world.wait(5)
    assert len(world.plans) == 1


# --- shares of reducing ------------------------------------------------------------------------------

NAMES = ("ann", "bob", "cid", "dan")


def reducing(world: World) -> dict[str, int]:
    """What each node reduces under the newest plan, in bytes per second, by name."""
    return {world.name_of(item.peer_id): item.max_reduce_bytes_per_second for item in world.plans[-1].assignments}


def swarm_with(uplinks: dict[str, float]) -> World:
    """Four nodes that train, and say what they measured."""
    world = World()
    world.train(*NAMES)
    world.uplinks = uplinks
    for name in NAMES:
        world.say(name)
    return world


def test_who_has_a_thin_uplink_reduces_less_once_that_was_so_for_a_while() -> None:
    world = swarm_with({"ann": 12.5e6, "bob": 12.5e6, "cid": 12.5e6, "dan": 2.5e6})
    assert len(set(reducing(world).values())) == 1
    world.wait(world.policy.reshare_after_seconds - 1)
    assert len(world.plans) == 1
    world.wait(2)
    rates = reducing(world)
    assert rates["dan"] == 0
    assert rates["ann"] == rates["bob"] == rates["cid"] > 0
    assert "follow the reported uplinks" in world.plans[-1].reason
    world.wait(3 * world.policy.reshare_after_seconds)
    assert len(world.plans) == 2


def test_a_measurement_that_does_not_last_changes_nothing() -> None:
    world = swarm_with({"dan": 2.5e6, "ann": 12.5e6})
    world.wait(world.policy.reshare_after_seconds / 2)
    world.uplinks["dan"] = 12.5e6
    world.say("dan")
    world.wait(2 * world.policy.reshare_after_seconds)
    assert len(world.plans) == 1


@pytest.mark.parametrize("said", [math.nan, math.inf, -1.0, 1e300])
def test_an_uplink_that_cannot_be_is_none(said: float) -> None:
    world = swarm_with(dict.fromkeys(NAMES, 1e6) | {"dan": said})
    world.wait(2 * world.policy.reshare_after_seconds)
    assert len(world.plans) == 1


def test_a_boast_brings_no_more_than_twice_an_equal_share() -> None:
    world = swarm_with(dict.fromkeys(NAMES, 1e6) | {"dan": 1e12})
    world.wait(2 * world.policy.reshare_after_seconds)
    rates = reducing(world)
    assert rates["dan"] <= 0.5 * sum(rates.values()) * 1.000001


RELAYED, DIRECT = "/ip4/10.0.0.9/tcp/4001/p2p/12D3KooWSeed/p2p-circuit/p2p/{}", "/ip4/9.8.7.6/tcp/4001/p2p/{}"


@pytest.mark.parametrize(
    ("relayed", "idle"), [({"dan"}, {"dan"}), ({"ann", "bob", "cid"}, {"ann", "bob", "cid"}), (set(NAMES), set())]
)
def test_who_cannot_be_dialled_reduces_nothing_unless_nobody_can(relayed: set[str], idle: set[str]) -> None:
    world = swarm_with({})
    for name in NAMES:
        addresses = [RELAYED] if name in relayed else [RELAYED, DIRECT]
        world.say(name, multiaddrs=[form.format(world.identities[name].peer_id) for form in addresses])
    world.wait(world.policy.reshare_after_seconds + 1)
    assert {name for name, rate in reducing(world).items() if not rate} == idle


def test_a_new_member_changes_the_plan_at_once_and_the_shares_with_it() -> None:
    world = swarm_with({"ann": 12.5e6, "bob": 12.5e6, "cid": 12.5e6, "dan": 2.5e6})
    world.join("eve")
    world.wait(world.policy.debounce_seconds + 1)
    assert len(world.plans) == 2
    assert reducing(world)["dan"] < reducing(world)["ann"]


def test_a_newcomer_waits_for_its_own_debounce_also_while_shares_are_about_to_change() -> None:
    world = swarm_with({"ann": 12.5e6, "bob": 12.5e6, "cid": 12.5e6, "dan": 2.5e6})
    world.wait(world.policy.reshare_after_seconds / 2)
    world.join("eve")
    world.wait(world.policy.debounce_seconds / 2)
    assert len(world.plans) == 1
    world.join("fay")
    world.wait(world.policy.debounce_seconds)
    assert len(world.plans) == 2
    assert world.members() == {*NAMES, "eve", "fay"}
