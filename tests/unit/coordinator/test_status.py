"""What the page and the metrics are given."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import re
import socket
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support.memory_store import MemoryStore
from unit.coordinator.world import CORPUS, RUN, World

from atoll.coordinator import server
from atoll.coordinator.controller import Controller
from atoll.coordinator.rounds.source_losses import from_text
from atoll.coordinator.runs import machine
from atoll.coordinator.state.snapshot import Policy
from atoll.coordinator.store.records import Evaluation
from atoll.coordinator.store.store import RoundMeans
from atoll.coordinator.web import metrics
from atoll.coordinator.web.metrics import StateCollector
from atoll.coordinator.web.status import Logs, status
from atoll.core.clock import ManualClock
from atoll.core.identity import Identity
from atoll.core.sdnotify import notify, watchdog_seconds
from atoll.v1 import membership_pb2 as mb


def test_status_is_json_whatever_nodes_report() -> None:
    world = World()
    world.train("ann", "bob")
    bad = mb.NodeStatus(state=99, train_loss=math.nan, tokens_per_second=math.inf, step_seconds=-1)  # type: ignore[arg-type]
    peer = world.identities["ann"].peer_id
    request = mb.HeartbeatRequest(status=bad)
    world.take(machine.heartbeat(world.state, world.now, peer, world.sessions[peer], request))
    logs = Logs(evaluations={RUN: (Evaluation(RUN, 1, 4.5, 1000),)})
    document = json.loads(json.dumps(status(world.state, world.now, logs, "1.2.3"), allow_nan=False))
    assert document["version"] == 1
    assert document["runs"][0]["losses"] == [{"round": 1, "loss": 4.5, "committed_tokens": 1000}]
    stages = [(stage["first"], stage["last"]) for route in document["runs"][0]["plan"]["routes"] for stage in route]
    assert stages == [(0, document["runs"][0]["plan"]["layers"] - 1)] * 2
    shown = {node["name"]: node for node in document["nodes"]}
    assert (shown["ann"]["state"], shown["ann"]["planned"], shown["ann"]["train_loss"]) == ("unspecified", True, 0.0)


def metrics_of(world: World) -> str:
    controller = Controller(MemoryStore(), Identity.generate(), ManualClock(), Policy())
    controller.state = world.state
    registry = CollectorRegistry()
    registry.register(StateCollector(controller))
    text = generate_latest(registry).decode()
    controller.close()
    return text


def test_metrics_name_runs_and_states_and_no_peers() -> None:
    world = World()
    world.train("ann", "bob")
    text = metrics_of(world)
    assert 'atoll_nodes{run="reef",state="training"} 2.0' in text
    assert 'atoll_run_plan_version{run="reef"} 1.0' in text
    assert "12D3KooW" not in text
    assert all(line.startswith(("#", "atoll_")) for line in text.splitlines())


def test_a_bounded_number_of_nodes_has_series_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_NAMED_NODES", 2)
    world = World()
    world.train("cleo", "bob", "ann")
    peer = world.identities["ann"].peer_id
    told = mb.NodeStatus(state=mb.NODE_STATE_TRAINING, train_loss=2.5, tokens_per_second=800.0, head_round=3)
    request = mb.HeartbeatRequest(status=told)
    world.take(machine.heartbeat(world.state, world.now, peer, world.sessions[peer], request))
    text = metrics_of(world)
    assert 'atoll_node_train_loss{node="ann",run="reef"} 2.5' in text
    assert 'atoll_node_tokens_per_second{node="ann",run="reef"} 800.0' in text
    assert 'atoll_node_head_round{node="ann",run="reef"} 3.0' in text
    assert 'atoll_node_train_loss{node="bob"' not in text  # not measured
    assert set(re.findall(r'node="([^"]*)"', text)) == {"ann", "bob"}
    assert "atoll_nodes_without_series 1.0" in text


def test_losses_on_the_page_have_what_nodes_reported_of_their_rounds() -> None:
    world = World()
    world.train("ann", "bob")
    losses = tuple(Evaluation(RUN, number, 4.5, 1000) for number in (1, 2, 3))
    logs = Logs(evaluations={RUN: losses}, means={RUN: (RoundMeans(1, 4.75, 90.0), RoundMeans(3, 0.0, 80.0))})
    (run,) = json.loads(json.dumps(status(world.state, world.now, logs, "1"), allow_nan=False))["runs"]
    assert [(point.get("train_loss"), point.get("tokens_per_second")) for point in run["losses"]] == [
        (4.75, 90.0),
        (None, None),
        (None, 80.0),
    ]


def test_the_page_and_metrics_tell_how_long_nodes_wait_for_text() -> None:
    world = World()
    world.train("ann", "bob", "cleo")
    for name, share, state in (
        ("ann", 0.5, mb.NODE_STATE_TRAINING),
        ("bob", 7.5, mb.NODE_STATE_TRAINING),
        ("cleo", 0.25, mb.NODE_STATE_PAUSED),
    ):
        waits = mb.NodeStatus(
            state=state,
            data_stall_share=share,
            data_bytes_fetched=300,
            data_bytes_trained=200,
        )
        peer = world.identities[name].peer_id
        request = mb.HeartbeatRequest(status=waits)
        world.take(machine.heartbeat(world.state, world.now, peer, world.sessions[peer], request))
    shown = {str(node["name"]): node for node in status(world.state, world.now, Logs(), "1")["nodes"]}  # type: ignore[attr-defined]
    assert (shown["ann"]["data_stall_share"], shown["bob"]["data_stall_share"]) == (0.5, 1.0)  # a share is at most 1
    assert shown["ann"]["data_bytes_fetched"] == 300
    text = metrics_of(world)
    assert 'atoll_data_stall_ratio{run="reef",statistic="mean"} 0.75' in text  # a paused node does not count
    assert 'atoll_data_stall_ratio{run="reef",statistic="max"} 1.0' in text
    assert 'atoll_data_fetched_bytes{run="reef"} 900.0' in text
    assert 'atoll_data_trained_bytes{run="reef"} 600.0' in text


def test_the_page_and_metrics_have_a_loss_for_each_source() -> None:
    world = World()
    mixture = "mixture = [{ weights = { web = 3, code = 1 } }]"
    world.train("ann", "bob", data=f'source = "corpus"\ncorpus = "{CORPUS}"\n{mixture}')
    web = mb.SourceLoss(name="web", loss=4.5, windows=48, tokens=3000)
    code = mb.SourceLoss(name="code", loss=6.5, windows=16)
    world.say("ann", evaluations=[mb.EvaluationReport(loss=5.0, sources=[web, code])])
    logs = Logs(evaluations={RUN: (Evaluation(RUN, 0, 5.5, 0), Evaluation(RUN, 0, 5.0, 0, world.run.sources))})
    (run,) = json.loads(json.dumps(status(world.state, world.now, logs, "1"), allow_nan=False))["runs"]
    assert [point.get("sources") for point in run["losses"]] == [None, {"web": 4.5, "code": 6.5}]
    assert run["sources"][0] == {"name": "web", "loss": 4.5, "windows": 48, "tokens": 3000}
    text = metrics_of(world)
    assert 'atoll_run_source_validation_loss{run="reef",source="code"} 6.5' in text
    assert 'atoll_run_source_tokens{run="reef",source="web"} 3000.0' in text
    assert 'atoll_run_source_tokens{run="reef",source="code"}' not in text  # unknown


def test_labels_of_sources_are_bounded_however_many_names_a_member_invents() -> None:
    world = World()
    world.train("ann", "bob", data=f'source = "corpus"\ncorpus = "{CORPUS}"')
    labels = set[str]()
    for first in range(0, 640, 64):
        sources = [mb.SourceLoss(name=f"s{first + at}", loss=1.0 + at % 2, windows=2) for at in range(63)]
        sources.append(mb.SourceLoss(name="s0", loss=4.5, windows=48, tokens=3000))
        if first == 0:
            sources = sources[1:]
        world.say("ann", evaluations=[mb.EvaluationReport(loss=5.0, sources=sources)])
        labels |= set(re.findall(r'validation_loss{run="reef",source="([^"]*)"}', metrics_of(world)))
        if first == 320:
            world.restart()
            for name in ("ann", "bob"):
                world.connect(name, mb.NODE_STATE_TRAINING)
    assert labels == {*(f"s{number}" for number in range(63)), "s64", "other"}
    found = {source.name: source for source in from_text(world.run.sources)}
    assert (found["s0"].loss, found["s0"].windows) == (4.5, 48)
    assert (found["other"].windows, found["other"].loss) == (
        126,
        pytest.approx(sum(1 + at % 2 for at in range(63)) / 63),
    )


def test_systemd_is_notified_over_its_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        assert notify(str(tmp_path / "notify"), "READY=1")
        assert listener.recv(64) == b"READY=1"
    assert not notify(str(tmp_path / "notify"), "READY=1")  # nobody listens any more
    assert not notify("", "READY=1")


def test_systemd_is_notified_also_without_free_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        assert notify(str(tmp_path / "notify"), "READY=1")

        def refuse(*_: object) -> socket.socket:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(socket, "socket", refuse)
        assert notify(str(tmp_path / "notify"), "WATCHDOG=1")
        assert (listener.recv(64), listener.recv(64)) == (b"READY=1", b"WATCHDOG=1")


async def test_a_credential_that_cannot_be_written_now_is_written_an_hour_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = asyncio.Event()

    def write(*_: object) -> None:
        if attempts.pop():
            raise OSError(errno.EMFILE, "Too many open files")
        tried.set()

    attempts = [False, True]
    monkeypatch.setattr(server, "CREDENTIAL_SECONDS", 0.0)
    monkeypatch.setattr(server, "write_admin_credential", write)
    renewing = asyncio.create_task(server._renew_credential(cast("Any", None), tmp_path, "here", ManualClock()))
    async with asyncio.timeout(60):
        await tried.wait()
    renewing.cancel()


def test_the_watchdog_is_fed_twice_as_often_as_asked() -> None:
    assert watchdog_seconds({"WATCHDOG_USEC": "30000000"}) == 15.0
    assert watchdog_seconds({}) is None
    assert watchdog_seconds({"WATCHDOG_USEC": "soon"}) is None
