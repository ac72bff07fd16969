"""`atollctl plan explain` on answers of a coordinator: what it says of a live plan, and when it cannot."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from unit.coordinator.world import spec_toml

from atoll.coordinator.cli.plan_explain import explain_running_plan, live_plan
from atoll.core.errors import InvalidTransition, PlanInputInvalid
from atoll.core.output import Output
from atoll.v1 import admin_pb2 as wire
from atoll.v1 import common_pb2 as pb
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import plan_pb2

SECONDS = {"embedding": 1e-6, "block": 4e-6, "head": 2e-6}  # a token, forward
FLOPS = {"embedding": 0.0, "block": 2e6, "head": 1e6}
KINDS = ["embedding", "block", "block", "head"]
PACE = 1 / (3 * (1e-6 + 2 * 4e-6 + 2e-6))  # tokens a second


def node(name: str, slower: float = 1.0, *, training: bool = True, **others: float) -> wire.NodeView:
    """A node that is so many times slower, `others` being its round trips in milliseconds."""
    times = [
        mb.LayerTime(kind=kind, forward_seconds_per_token=slower * time, backward_seconds_per_token=2 * slower * time)
        for kind, time in SECONDS.items()
    ]
    return wire.NodeView(
        peer_id=f"peer-{name}",
        name=name,
        connected=True,
        profile=mb.NodeProfile(
            device="cuda:0",
            device_name="RTX",
            device_memory_bytes=8 << 30,
            host_memory_bytes=8 << 30,
            layer_times=times,
        ),
        status=mb.NodeStatus(uplink_bytes_per_second=5e6, tokens_per_second=PACE / slower if training else 0.0),
        multiaddrs=["/ip4/8.8.8.8/tcp/1"],
        paths=[mb.PeerPath(peer_id=f"peer-{peer}", rtt_seconds=rtt / 1000) for peer, rtt in others.items()],
    )


def answers(*nodes: wire.NodeView, version: int = 3) -> dict[str, Any]:
    table = plan_pb2.LayerTable(
        layers=[
            plan_pb2.LayerInfo(
                name=f"layer-{number}",
                kind=kind,
                parameters=1_000_000,
                flops_per_token_forward=FLOPS[kind],
                activation_bytes_per_token=1024,
            )
            for number, kind in enumerate(KINDS)
        ]
    )
    plan = plan_pb2.Plan(
        run_id="reef",
        version=version,
        assignments=[
            plan_pb2.Assignment(peer_id=it.peer_id, span=plan_pb2.Span(first=0, last=len(KINDS) - 1)) for it in nodes
        ],
        routes=[plan_pb2.Route(peer_ids=[it.peer_id]) for it in nodes],
    )
    rounds = [
        wire.RoundView(round=pb.RoundId(number=number), committed=True, unix_ms=1000 * 7 * number)
        for number in range(1, 6)
    ]
    return {
        "GetRun": wire.RunView(
            run_id="reef", spec_toml=spec_toml(round_tokens=10**6), plan_version=version, head_round=5, layers=table
        ),
        "GetPlan": wire.PlanView(plan=plan),
        "ListNodes": wire.ListNodesResponse(nodes=nodes),
        "ListRounds": wire.ListRoundsResponse(rounds=rounds),
    }


def explained(given: dict[str, Any], capsys: pytest.CaptureFixture[str], output: Output = Output.JSON) -> Any:
    client = SimpleNamespace(
        stub=SimpleNamespace(**{name: name for name in given}), call=lambda method, request: given[method]
    )
    explain_running_plan(client, "", 0.5, output)  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    return json.loads(printed) if output is Output.JSON else printed


def test_a_plan_of_replicas_is_predicted_to_train_what_its_members_do(capsys):
    ann, bob = node("ann", bob=30), node("bob", 2.0, ann=31)
    told = explained(answers(ann, bob), capsys)
    measured = PACE * 1.5
    assert told["measured"] == {"tokens_per_second": pytest.approx(measured), "round_seconds": 7.0}
    assert told["plan"]["tokens_per_second"] == pytest.approx(measured, rel=0.01)
    assert [place["machine"] for place in told["plan"]["places"]] == ["ann", "bob"]
    assert told["best"]["tokens_per_second"] >= 0.999 * told["plan"]["tokens_per_second"]
    assert not told["doubts"]


def test_the_text_names_limits_false_claims_and_remedies(capsys):
    ann = node("ann", bob=3)
    boaster = node("bob", ann=31)
    boaster.status.tokens_per_second /= 10
    text = explained(answers(ann, boaster), capsys, Output.TEXT)
    assert "measured: " in text
    assert "measured: every 7 s" in text
    assert "bottleneck:" in text
    assert "with one more RTX:" in text
    assert "bob trains 10.0 times slower than its profile says" in text


def test_pins_bind_what_is_advised_and_help_is_beside_the_best_that_they_allow(capsys):
    ann, bob = node("ann", bob=30), node("bob", ann=31)
    given = answers(ann, bob)
    for it, assignment, span in zip((ann, bob), given["GetPlan"].plan.assignments, ((0, 1), (2, 3)), strict=True):
        given["ListNodes"].nodes[0 if it is ann else 1].pin = f"{span[0]}-{span[1]}"
        assignment.span.first, assignment.span.last = span
    del given["GetPlan"].plan.routes[1]
    given["GetPlan"].plan.routes[0].peer_ids.append(bob.peer_id)
    told = explained(given, capsys)
    spans = [[(it["machine"], it["first"], it["last"]) for it in route] for route in told["best"]["routes"]]
    assert spans == [[("ann", 0, 1), ("bob", 2, 3)]]
    times = {it["what"]: it["times"] for it in told["plan"]["help"]}
    assert times["ann's link twice as fast"] < 2
    text = explained(given, capsys, Output.TEXT)
    assert "no other layout of these machines would be noticeably faster" in text


def test_a_plan_that_no_longer_fits_or_ignores_pins_is_reported(capsys):
    given = answers(node("ann", bob=30), node("bob", ann=31))
    given["ListNodes"].nodes[0].pin = "out"
    text = explained(given, capsys, Output.TEXT)
    assert "ann has a pin that this plan does not follow yet" in text
    given["ListNodes"].nodes[0].pin = ""
    for it in given["ListNodes"].nodes:
        it.profile.device_memory_bytes = 1000
    with pytest.raises(InvalidTransition, match="this plan does not fit"):
        explained(given, capsys)


def test_an_impossible_profile_is_reported(capsys):
    broken = node("bob", ann=31)
    del broken.profile.layer_times[:]
    with pytest.raises(InvalidTransition, match="bob has neither a time for layers"):
        explained(answers(node("ann", bob=30), broken), capsys)


def test_the_coordinator_s_preferences_are_used(capsys):
    """Both train for the same money, the slow one for ten times of it a token: who asks for price wants one."""
    ann, bob = node("ann", bob=3), node("bob", 4.0, ann=3)
    ann.profile.price_per_hour, bob.profile.price_per_hour = 0.1, 4.0
    given = answers(ann, bob)
    assert len(explained(given, capsys)["best"]["routes"]) == 2
    given["GetPlan"].wishes.MergeFrom(
        wire.PlanWishes(goal="price", hysteresis=0.05, horizon_seconds=3600, rtt_cap_seconds=0.08)
    )
    assert [route[0]["machine"] for route in explained(given, capsys)["best"]["routes"]] == ["ann"]


def test_nodes_of_one_name_are_told_apart(capsys):
    one, other = node("same"), node("same")
    other.peer_id = "peer-another"
    names = [place["machine"] for place in explained(answers(one, other), capsys)["plan"]["places"]]
    assert names == ["same …r-same", "same …nother"]


def test_a_plan_that_cannot_be_explained_gives_the_reason():
    silent = wire.NodeView(peer_id="peer-cid", name="cid")
    given = answers(node("ann"), silent)
    told = given["GetRun"], given["GetPlan"].plan, given["ListNodes"].nodes, []
    with pytest.raises(InvalidTransition, match="cid has not reported a profile"):
        live_plan(*told)
    with pytest.raises(InvalidTransition, match="a member has not reported"):
        live_plan(told[0], told[1], [], [])
    gap = answers(node("ann"))
    gap["GetPlan"].plan.assignments[0].span.last = 1
    with pytest.raises(PlanInputInvalid, match="does not cover the layers"):
        live_plan(gap["GetRun"], gap["GetPlan"].plan, gap["ListNodes"].nodes, [])


def test_a_run_without_a_plan_has_nothing_to_explain(capsys):
    with pytest.raises(InvalidTransition, match="no plan yet"):
        explained(answers(node("ann"), version=0), capsys)
