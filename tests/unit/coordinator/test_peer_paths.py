"""What nodes tell of themselves and of one another, on its way to the planner."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.coordinator.world import World, spec_toml

from atoll.coordinator.planner.checks import check_problem
from atoll.coordinator.planner.problem import Problem, Reach, Wishes, decoder_layers
from atoll.coordinator.planner.problem_from_nodes import MAX_MISMATCH_FACTOR, PlannerNode, problem_from_nodes, wishes_of
from atoll.coordinator.planner.question import Path, Preferences
from atoll.coordinator.planner.reduce_shares import MAX_UPLINK_BYTES_PER_SECOND
from atoll.coordinator.planner.solve import solve
from atoll.coordinator.sanitize import sanitized_message
from atoll.coordinator.state import peer_paths
from atoll.coordinator.state.peer_paths import MAX_PATHS
from atoll.core.clock import SystemClock
from atoll.core.run_spec import parse_run_spec
from atoll.v1 import membership_pb2 as mb
from atoll.v1.plan_pb2 import Span

SPEC = parse_run_spec(spec_toml())
LAYERS = decoder_layers(blocks=4, dimension=64, block_parameters=50_000, vocabulary=256, sequence_length=64)
KINDS = {"embedding": 1e-7, "block": 1e-5, "head": 4e-6}
SECONDS = 3 * (KINDS["embedding"] + 4 * KINDS["block"] + KINDS["head"])  # a token, forward and backward


def node(name: str, rtts: dict[str, float] | None = None, *, trains: float = 0.0) -> PlannerNode:
    times = [
        mb.LayerTime(kind=kind, forward_seconds_per_token=time, backward_seconds_per_token=2 * time)
        for kind, time in KINDS.items()
    ]
    profile = mb.NodeProfile(
        device="cuda:0", device_memory_bytes=8 << 30, host_memory_bytes=16 << 30, layer_times=times
    )
    status = mb.NodeStatus(uplink_bytes_per_second=5e6, tokens_per_second=trains)
    found = {peer: Path(rtt, 0.0, 0.0) for peer, rtt in (rtts or {}).items()}
    return PlannerNode(name, name, profile, status, ("/ip4/8.8.8.8/tcp/7710",), found)


def problem(*nodes: PlannerNode) -> tuple[Problem, dict[str, str]]:
    seen = problem_from_nodes(nodes, LAYERS, SPEC, Wishes())
    check_problem(seen.problem)
    return seen.problem, dict(seen.doubts)


def test_the_longer_of_two_round_trips_holds_and_missing_ones_go_over_others():
    found, doubts = problem(node("a", {"b": 0.02}), node("b", {"a": 0.03, "c": 0.1}), node("c"))
    expected = [[0.0, 0.03, 0.13], [0.03, 0.0, 0.1], [0.13, 0.1, 0.0]]
    assert np.allclose(found.links.rtt_seconds, expected)
    assert not doubts


def test_speeds_are_those_at_which_a_node_really_trains_and_a_boast_is_told():
    honest = node("honest", trains=1 / SECONDS * 0.8)
    boaster = node("boaster", trains=1 / SECONDS / 10)
    found, doubts = problem(honest, boaster, node("new"))
    for machine, factor in zip(
        found.machines, (1 / 0.8, 10.0, MAX_MISMATCH_FACTOR), strict=True
    ):  # who is new is as others are
        forward, backward = machine.seconds_per_token["block"]
        assert (forward, backward) == pytest.approx((factor * 1e-5, factor * 2e-5))
    assert [machine.speed_measured for machine in found.machines] == [True, True, False]
    assert len(doubts) == 1
    assert "boaster trains 10.0 times slower" in doubts["boaster"]


def stage(name: str, first: int, last: int, seconds: float, *, last_correction: float = 0.0) -> PlannerNode:
    """A node that took so long a token of these layers."""
    found = replace(node(name, trains=1.0), alone=False, last_correction=last_correction)
    found.status.computed.CopyFrom(mb.SpanTime(layers=Span(first=first, last=last), seconds_per_token=seconds))
    return found


def test_stages_are_corrected_by_what_their_own_layers_take():
    """Two blocks forward twice and backward; a block and the head, whose stage is the last, forward once."""
    middle, last = stage("middle", 1, 2, 1.5 * 2 * 4e-5), stage("last", 4, 5, 1.5 * (3e-5 + 3 * KINDS["head"]))
    found, doubts = problem(middle, last)
    for machine in found.machines:
        assert machine.seconds_per_token["block"] == pytest.approx((1.5e-5, 3e-5))
        assert machine.speed_measured
    assert not doubts


def test_who_has_no_figure_now_counts_as_it_was_seen_last_and_a_newcomer_rather_slow():
    known = replace(node("known"), alone=False, last_correction=2.0)
    found, _ = problem(known, stage("other", 1, 2, 1.2 * 2 * 4e-5), node("new"))
    times = [machine.seconds_per_token["block"][0] for machine in found.machines]
    assert times == pytest.approx([2e-5, 1.2e-5, 2e-5])
    assert [machine.speed_measured for machine in found.machines] == [True, True, False]


@pytest.mark.parametrize("told", [math.nan, -1.0, math.inf, 30.0])
def test_the_pace_that_an_owner_sets_is_planned_with_and_is_not_taken_for_its_speed(told):
    paced, honest = node("paced", trains=0.1 / SECONDS), node("honest", trains=1 / SECONDS)
    paced.profile.minimum_step_seconds, paced.status.step_seconds = told, 30.1
    paced.profile.tokens_per_second = 1 / SECONDS  # probed before that pace was set
    found, doubts = problem(paced, honest)
    held = {30.0: 30.0, math.inf: 3600.0}.get(told, 0.0)
    assert [machine.minimum_step_seconds for machine in found.machines] == [held, 0.0]
    slow = found.machines[0].seconds_per_token["block"][0]
    assert slow == pytest.approx(1e-5 if held else 1e-4)
    assert ("paced" in doubts) == (not held)


@pytest.mark.parametrize("seconds", [1e308, 5e-324, 1e-300, 1e30])
@pytest.mark.parametrize("layer", [0.0, 5e307, 5e-324])
def test_no_word_of_a_node_s_stops_the_planner(seconds, layer):
    wild, fast = stage("wild", 1, 2, seconds), node("fast", trains=5e-324)
    for time in wild.profile.layer_times:
        time.forward_seconds_per_token = time.backward_seconds_per_token = layer
    wild.profile.price_per_hour, wild.profile.tokens_per_second = 5e-324, 1e308
    for goal in ("time", "price"):
        seen = problem_from_nodes([wild, fast, node("new")], LAYERS, SPEC, wishes_of(Preferences(goal=goal)))
        check_problem(seen.problem)
        found = solve(seen.problem, clock=SystemClock(), rng=random.Random(0), seconds=0.5, steps=3)
        assert math.isfinite(found.evaluation.tokens_per_second)
        assert all(len(told) < 100 for told in seen.doubts.values())


def test_who_asks_for_nothing_is_no_bargain_where_plans_are_to_be_cheap():
    dear, free = node("dear"), node("free")
    dear.profile.price_per_hour = 2.0
    cheap = wishes_of(Preferences(goal="price"))
    seen = problem_from_nodes([dear, free], LAYERS, SPEC, cheap)
    check_problem(seen.problem)
    assert [machine.price_per_hour for machine in seen.problem.machines] == [2.0, 2.0]
    nobody = problem_from_nodes([free], LAYERS, SPEC, cheap)
    check_problem(nobody.problem)
    assert nobody.problem.wishes.goal == "time"


@pytest.mark.parametrize(
    "took",
    [
        mb.SpanTime(layers=Span(first=2, last=1), seconds_per_token=1.0),
        mb.SpanTime(layers=Span(first=1, last=6), seconds_per_token=1.0),
        mb.SpanTime(layers=Span(first=1, last=2), seconds_per_token=math.inf),
        mb.SpanTime(layers=Span(first=1, last=2), seconds_per_token=math.nan),
    ],
)
def test_times_of_layers_that_cannot_be_are_not_looked_at(took):
    odd = replace(node("stage"), alone=False)
    odd.status.computed.CopyFrom(took)
    found, _ = problem(odd)
    assert found.machines[0].seconds_per_token["block"] == (1e-5, 2e-5)
    assert not found.machines[0].speed_measured


@pytest.mark.parametrize(("came", "counts"), [(0.0, 5e6), (2e6, 5e6), (2e7, 2e7), (1e300, MAX_UPLINK_BYTES_PER_SECOND)])
def test_a_downlink_carries_what_came_over_it_and_what_goes_out_at_least(came, counts):
    home = node("home")
    home.status.downlink_bytes_per_second = came
    found, _ = problem(home)
    assert found.machines[0].downlink_bytes_per_second == counts


def test_who_says_its_round_trips_are_a_tenth_is_corrected_and_named():
    others = {name: {"liar": 0.1} for name in ("a", "b", "c")}
    liar = node("liar", dict.fromkeys(others, 0.01))
    found, doubts = problem(liar, *(node(name, rtts) for name, rtts in others.items()))
    assert np.allclose(found.links.rtt_seconds[0, 1:], 0.1)
    assert doubts.keys() == {"liar"}


def test_a_node_behind_nat_is_reached_over_relays():
    relayed = ("/ip4/10.0.0.2/tcp/1", "/ip4/8.8.8.8/tcp/1/p2p/x/p2p-circuit")
    found, _ = problem(replace(node("hidden"), multiaddrs=relayed), node("public"))
    assert [machine.reach for machine in found.machines] == [Reach.RELAYED, Reach.PUBLIC]


# --- heartbeats -----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("abcx"), st.floats(), st.floats())))
def test_no_figure_that_cannot_be_and_no_stranger_is_kept(told):
    messages = [mb.PeerPath(peer_id=peer, rtt_seconds=rtt, bytes_per_second=rate) for peer, rtt, rate in told]
    known = peer_paths.merge_reported_paths({}, messages, {"a", "b", "c"}, 5.0)
    assert set(known) <= {"a", "b", "c"}
    assert all(0 < path.rtt_seconds <= 60 and 0 <= path.bytes_per_second < math.inf for path in known.values())


def test_figures_are_smoothed_grow_stale_and_are_bounded():
    known = peer_paths.merge_reported_paths({}, [mb.PeerPath(peer_id="a", rtt_seconds=0.1)], {"a"}, 0.0)
    known = peer_paths.merge_reported_paths(known, [mb.PeerPath(peer_id="a", rtt_seconds=0.2)], {"a"}, 10.0)
    assert known["a"].rtt_seconds == pytest.approx(0.13)
    assert not peer_paths.merge_reported_paths(known, [], {"a"}, 10.0 + peer_paths.STALE_SECONDS)
    many = [f"peer-{number}" for number in range(2 * MAX_PATHS)]
    flood = [mb.PeerPath(peer_id=peer, rtt_seconds=0.1) for peer in many]
    assert len(peer_paths.merge_reported_paths({}, flood, set(many), 0.0)) == MAX_PATHS
    asked: list[str] = []

    def endless() -> Iterator[mb.PeerPath]:
        while True:
            asked.append("one more")
            yield mb.PeerPath(peer_id="stranger", rtt_seconds=0.1)

    peer_paths.merge_reported_paths({}, endless(), {"a"}, 0.0)
    assert len(asked) <= MAX_PATHS


def test_a_figure_inside_a_figure_is_looked_at_too():
    kept = sanitized_message(mb.NodeStatus(computed=mb.SpanTime(layers=Span(first=3), seconds_per_token=math.inf)))
    assert kept.computed == mb.SpanTime(layers=Span(first=3))


def test_a_heartbeat_brings_paths_and_a_tidy_profile():
    world = World()
    world.train("ann", "bob")
    bob = world.identities["bob"].peer_id
    times = [mb.LayerTime(kind="block\x1b[31m", forward_seconds_per_token=math.nan)] * 40
    told = [mb.PeerPath(peer_id=bob, rtt_seconds=0.05), mb.PeerPath(peer_id="stranger", rtt_seconds=0.05)]
    world.say("ann", paths=told, profile=mb.NodeProfile(device="cpu", layer_times=times))
    live = world.state.live[world.identities["ann"].peer_id]
    assert set(live.paths) == {bob}
    assert [(time.kind, time.forward_seconds_per_token) for time in live.profile.layer_times] == [("block[31m", 0.0)]
