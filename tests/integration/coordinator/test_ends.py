"""Runs that are deleted, nodes that are forgotten, and checkpoints on order: over gRPC, with the real `atollctl`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from click.testing import Result
from integration.coordinator.lab import SECONDS, Coordinator, Node, coordinator, error_of
from integration.coordinator.test_membership import training
from typer.testing import CliRunner
from unit.coordinator.model_files import Files, committed_checkpoint
from unit.coordinator.world import genesis_report, hash_of, spec_toml

from atoll.coordinator.cli import main
from atoll.coordinator.runs import deletion
from atoll.coordinator.state.draft import Step
from atoll.coordinator.state.snapshot import State, StepTime
from atoll.coordinator.store.records import Node as NodeRow
from atoll.core.clock import SystemClock
from atoll.core.errors import DeadlineExceeded, InvalidTransition, NotFound
from atoll.core.identity import Identity
from atoll.node.control.begin_membership import begin_membership
from atoll.node.control.credentials import Credentials
from atoll.node.control.enrol import enrol
from atoll.node.control.run_directories import put_in_place
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import membership_pb2 as mb

CLOCK = SystemClock()


async def ctl(home: Coordinator, *arguments: str) -> Result:
    command = [*arguments, "--credentials", str(home.data_dir / "admin")]
    return await asyncio.wait_for(asyncio.to_thread(CliRunner().invoke, main.app, command), SECONDS)


async def printed(home: Coordinator, *arguments: str) -> dict[str, object]:
    result = await ctl(home, *arguments, "--output", "json")
    assert result.exit_code == 0, result.output
    text = result.stdout[result.stdout.index('{\n  "version"') :]  # the coordinator here logs to the same stdout
    document: dict[str, object] = json.JSONDecoder().raw_decode(text)[0]
    return document


async def gone(home: Coordinator, *names: str) -> None:
    """Wait until these nodes have no stream and count as lost."""
    async with asyncio.timeout(SECONDS):
        while True:
            nodes = [node for node in home.controller.state.nodes.values() if node.name in names]
            lives = [home.controller.state.live.get(node.peer_id) for node in nodes]
            if all(live is None or (not live.connected and live.counted_as_lost) for live in lives):
                return
            await asyncio.sleep(0.05)


async def test_a_run_is_deleted_with_its_rows_and_its_nodes_are_told_so(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        ann = await home.node("ann")
        await ann.connect()
        result = await ctl(home, "run", "delete", "reef", "--yes")
        assert isinstance(result.exception, InvalidTransition)
        assert "stop it first" in result.exception.remedy
        await home.admin.StopRun(admin.RunRequest(run_id="reef"), timeout=SECONDS)
        result = await ctl(home, "run", "delete", "reef", "--yes")
        assert isinstance(result.exception, InvalidTransition)
        assert "are connected: ann" in str(result.exception)
        await ann.close()
        await gone(home, "ann")

        document = await printed(home, "run", "delete", "reef", "--yes")
        assert document["deleted"] == {"run_id": "reef", "head_round": 0, "nodes": 1, "tokens": 1}
        assert isinstance((await ctl(home, "run", "delete", "reef", "--yes")).exception, NotFound)
        assert (await printed(home, "run", "list"))["runs"] == []
        assert (await printed(home, "node", "list"))["nodes"] == []
        assert (await printed(home, "token", "list"))["tokens"] == []
        events = [event async for event in home.admin.Events(admin.EventsRequest(), timeout=SECONDS)]
        assert [(event.kind, event.subject) for event in events] == [("run.deleted", "reef")]

        await ann.connect(run_id="reef")
        refused = await ann.ended()
        assert error_of(refused).reason == "Forgotten"
        assert "deleted run 'reef'" in (refused.details() or "")
        await ann.close()
        async with ann.channel() as channel:
            stub = ann.stub_on(channel)
            for call in (
                stub.Standing(mb.StandingRequest(), timeout=SECONDS),
                stub.MoveToRun(mb.MoveToRunRequest(), timeout=SECONDS),
                stub.Leave(mb.LeaveRequest(), timeout=SECONDS),
                stub.Vote(mb.VoteRequest(), timeout=SECONDS),
                stub.Renew(mb.RenewRequest(csr_der=ann.csr, csr_signature=ann.csr_signature), timeout=SECONDS),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await call
                assert error_of(failed.value).reason == "Forgotten"


async def test_why_a_node_is_refused_outlives_a_restart_and_ends_with_a_new_token(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run(start=False)
        ann = await home.node("ann")
        await home.admin.DeleteRun(admin.DeleteRunRequest(run_id="reef"), timeout=SECONDS)
    async with coordinator(tmp_path / "c") as home:
        ann.home = home
        await ann.connect(run_id="reef")
        assert error_of(await ann.ended()).reason == "Forgotten"
        await ann.close()
        await home.create_run()
        await ann.enrol(await home.token())
        await ann.connect(run_id="reef")
        await ann.acknowledged(await ann.say(mb.NODE_STATE_READY))
        await ann.close()


async def test_a_plan_of_a_new_run_is_newer_than_those_of_a_deleted_one_of_its_name(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        old = max([await node.plan(1) for node in nodes], key=lambda response: len(response.plan.payload))
        await home.admin.StopRun(admin.RunRequest(run_id="reef"), timeout=SECONDS)
        for node in nodes:
            await node.close()
        await gone(home, "ann", "bob")
        await home.admin.DeleteRun(admin.DeleteRunRequest(run_id="reef"), timeout=SECONDS)
        assert home.controller.signed.plan("reef") is None
        await home.create_run(min_nodes=1)
        ann = nodes[0]
        ann.plan_version = 0
        await ann.enrol(await home.token())
        await ann.connect(run_id="reef")
        await ann.hear(lambda response: response.order == mb.ORDER_WRITE_GENESIS)
        assert not any(response.HasField("plan") for response in ann.heard)
        await ann.say(mb.NODE_STATE_READY, genesis=genesis_report(ann.identity))
        await ann.plan(2)
        assert old.plan.payload not in [response.plan.payload for response in ann.heard]


async def test_a_run_that_is_deleted_while_a_node_joins_gives_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run(start=False)
        token = await home.token()
        do = home.controller.do

        async def deleted_at_once(operation: Callable[[State, StepTime], Step[Any]]) -> object:
            result = await do(operation)
            if isinstance(result, NodeRow):
                await do(lambda state, now: deletion.delete(state, now, home.controller.policy, "reef"))
            return result

        monkeypatch.setattr(home.controller, "do", deleted_at_once)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await Node(home, Identity.generate(), "ann").enrol(token)
        assert error_of(failed.value).reason == "NotFound"


async def test_a_node_keeps_its_state_of_a_deleted_run_apart(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        identity, data_dir = Identity.generate(), tmp_path / "ann"
        data_dir.mkdir()
        run_dir = data_dir / "runs" / "reef"
        created = []
        for life in ("first", "second", "third", "fourth"):
            await home.create_run(start=False)
            created.append(home.controller.state.runs["reef"].created_ms)
            begin_membership(data_dir, await enrol(await home.token(), identity, "ann", CLOCK))
            begin_membership(data_dir, await enrol(await home.token(), identity, "ann", CLOCK))  # of the same run
            assert not (run_dir / "plan").exists()
            (run_dir / "plan").write_text(life)
            loaded = Credentials.load(data_dir)
            assert loaded is not None
            assert loaded.run_created_unix_ms == home.controller.state.runs["reef"].created_ms
            await home.admin.DeleteRun(admin.DeleteRunRequest(run_id="reef"), timeout=SECONDS)
            await asyncio.sleep(0.002)  # the next run is created in another millisecond
        found = {path.name: (path / "plan").read_text() for path in run_dir.parent.iterdir()}
        assert found == {"reef": "fourth", f"reef.{created[2]}": "third", f"reef.{created[1]}": "second"}


def credentials(created: int) -> Credentials:
    """Of the run "reef" that was created then."""
    fields = {"run_id": "reef", "run_created_unix_ms": created, "save": lambda directory: None}
    return SimpleNamespace(**fields)  # type: ignore[return-value]


def test_state_of_a_run_comes_back_with_the_run(tmp_path: Path) -> None:
    """Two coordinators use one name, and a node goes from one to the other and back."""
    plan = tmp_path / "runs" / "reef" / "plan"
    begin_membership(tmp_path, credentials(1))
    plan.write_text("one")
    begin_membership(tmp_path, credentials(2))
    assert not plan.exists()
    plan.write_text("two")
    for created, text in ((1, "one"), (2, "two"), (2, "two"), (1, "one")):
        begin_membership(tmp_path, credentials(created))
        assert plan.read_text() == text
    assert {path.name for path in plan.parent.parent.iterdir()} == {"reef", "reef.2"}


def test_the_states_used_last_stay_and_other_runs_with_similar_names_are_not_touched(tmp_path: Path) -> None:
    for other in ("reef-2", "ree", "reef.note"):
        (tmp_path / "runs" / other).mkdir(parents=True)
    for created in (1, 2, 3, 1, 4):
        begin_membership(tmp_path, credentials(created))
    found = {path.name for path in (tmp_path / "runs").iterdir()}
    assert found == {"reef-2", "ree", "reef.note", "reef", "reef.1", "reef.3"}


def test_after_a_crash_while_another_run_is_joined_the_present_ones_state_comes_back(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    begin_membership(tmp_path, credentials(1))
    (runs / "reef" / "plan").write_text("one")
    (runs / "reef").rename(runs / "reef.1")  # here it crashed; the credentials are those of run 1
    put_in_place(runs / "reef", 1)
    assert (runs / "reef" / "plan").read_text() == "one"


async def test_a_node_of_an_older_release_learns_when_its_run_was_created(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        told = [response.run_created_unix_ms for response in nodes[0].heard if response.run_created_unix_ms]
        assert told == [home.controller.state.runs["reef"].created_ms]


def test_state_from_before_runs_were_told_apart_is_kept(tmp_path: Path) -> None:
    begin_membership(tmp_path, credentials(0))
    (tmp_path / "runs" / "reef" / "plan").write_text("kept")
    begin_membership(tmp_path, credentials(5))
    begin_membership(tmp_path, credentials(0))
    begin_membership(tmp_path, credentials(5))
    assert (tmp_path / "runs" / "reef" / "plan").read_text() == "kept"


async def test_a_node_is_forgotten_comes_back_in_vain_and_joins_again_under_its_name(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        ann, bob = await home.node("ann"), await home.node("bob")
        await ann.connect()
        assert isinstance((await ctl(home, "node", "forget", "ann", "--yes")).exception, InvalidTransition)
        await ann.close()
        await gone(home, "ann")
        listed = await printed(home, "node", "forget", "--lost-for", "0.5", "--yes")
        assert listed["forgotten"] == []
        document = await printed(home, "node", "forget", "ann", bob.identity.peer_id, "--yes")
        assert [item["name"] for item in document["forgotten"]] == ["ann", "bob"]  # type: ignore[attr-defined]
        assert isinstance((await ctl(home, "node", "forget", "ann", "--yes")).exception, NotFound)
        banned = await printed(home, "node", "ban", bob.identity.peer_id, "--yes")
        assert (banned["node"]["name"], banned["node"]["banned"]) == ("bob", True)  # type: ignore[index]
        assert bob.identity.peer_id in home.controller.state.deny.peer_ids

        await ann.connect(run_id="reef")
        refused = await ann.ended()
        assert error_of(refused).reason == "Forgotten"
        assert "removed this node from run 'reef'" in (refused.details() or "")
        await ann.close()
        await ann.enrol(await home.token())
        await ann.connect(run_id="reef")
        await ann.acknowledged(await ann.say(mb.NODE_STATE_READY))
        (node,) = (await home.admin.ListNodes(admin.ListNodesRequest(), timeout=SECONDS)).nodes
        assert (node.name, node.peer_id) == ("ann", ann.identity.peer_id)
        await ann.close()


async def committed(nodes: list[Node]) -> Files:
    """Round 1, which all nodes hold and the coordinator knows."""
    files = committed_checkpoint(hash_of(genesis_report(nodes[0].identity)), [node.identity for node in nodes])
    report = mb.RoundReport(round=files.name, committed=True, manifest=files.manifest, seconds=1)
    for node in nodes:
        node.head = (1, files.info().manifest_hash)
        await node.acknowledged(await node.say(rounds=[report]))
    return files


async def test_a_checkpoint_on_order_waits_for_all_layers(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        result = await ctl(home, "run", "checkpoint", "reef")
        assert isinstance(result.exception, InvalidTransition)  # no round yet
        files = await committed(nodes)
        ordering = asyncio.create_task(printed(home, "run", "checkpoint", "reef", "--timeout", "80s"))
        for node, part in zip(nodes, (files.part(0, 1), files.part(2, 2)), strict=True):
            await node.hear(lambda response: response.checkpoint_round == 1)
            assert not ordering.done()
            await node.say(checkpoints=[part.info()], checkpoints_changed=True)
        found = (await ordering)["checkpoint"]
        assert (found["round"], found["written_round"], found["missing"]) == (1, 1, "")  # type: ignore[index]
        held = sorted((item["node_name"], item["checkpoint"]["layers"]["first"]) for item in found["checkpoints"])  # type: ignore[index]
        assert sorted(first for _, first in held) == [0, 2]
        for node in nodes:
            await node.hear(lambda response: response.checkpoint_round == 0)


async def test_a_checkpoint_of_some_layers_only_is_no_success(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        files = await committed(nodes)
        await nodes[0].acknowledged(await nodes[0].say(checkpoints=[files.part(0, 1).info()], checkpoints_changed=True))
        result = await ctl(home, "run", "checkpoint", "reef", "--timeout", "1s")
        assert isinstance(result.exception, DeadlineExceeded)
        assert result.stdout == ""
        assert f"layer 2 missing; not written by: {nodes[1].name}" in str(result.exception)


async def test_two_operators_delete_one_run_at_once(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        created = admin.CreateRunRequest(spec_toml=spec_toml())
        await home.admin.CreateRun(created, timeout=SECONDS)
        request = admin.DeleteRunRequest(run_id="reef")
        calls = [home.admin.DeleteRun(request, timeout=SECONDS) for _ in range(4)]
        reads = [home.admin.GetRun(admin.RunRequest(run_id="reef"), timeout=SECONDS) for _ in range(8)]
        found = await asyncio.gather(*calls, *reads, return_exceptions=True)
        assert sum(isinstance(item, admin.DeleteRunResponse) for item in found) == 1
        failed = [item for item in found if isinstance(item, grpc.aio.AioRpcError)]
        assert {error_of(item).reason for item in failed} <= {"NotFound"}
