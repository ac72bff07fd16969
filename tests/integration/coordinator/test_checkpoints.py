"""Checkpoints through the coordinator: listed, pulled by the real `atollctl`, passed on without being kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import SimpleNamespace

import grpc
from click.testing import Result
from integration.coordinator.lab import SECONDS, Coordinator, Node, coordinator
from integration.coordinator.test_membership import training
from typer.testing import CliRunner
from unit.coordinator.model_files import Files, checkpoint, committed_checkpoint
from unit.coordinator.world import genesis_report, hash_of

from atoll.coordinator.cli import main
from atoll.coordinator.services.checkpoint_relay import (
    MAX_BUFFERED_MESSAGES,
    MAX_CONCURRENT_PARTS,
    CheckpointRelay,
    RelayedUpload,
)
from atoll.coordinator.store.records import Checkpoint
from atoll.core.errors import AtollError, CheckpointCorrupt, NotFound, PeerMisbehaved, Unreachable
from atoll.core.identity import Identity
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import membership_pb2 as mb


async def ctl(home: Coordinator, *arguments: str) -> Result:
    command = ["checkpoint", *arguments, "--credentials", str(home.data_dir / "admin")]
    return await asyncio.wait_for(asyncio.to_thread(CliRunner().invoke, main.app, command), SECONDS)


async def hold(node: Node, files: Files) -> None:
    await node.acknowledged(await node.say(checkpoints=[files.info()], checkpoints_changed=True))


async def ordered(node: Node) -> mb.UploadOrder:
    return (await node.hear(lambda response: len(response.uploads) > 0)).uploads[0]


async def upload(node: Node, messages: Iterable[mb.CheckpointUpload]) -> None:
    async def sending() -> AsyncIterator[mb.CheckpointUpload]:
        for message in messages:
            yield message

    await node.stub.UploadCheckpoint(sending(), timeout=SECONDS)


async def test_a_checkpoint_travels_from_the_node_to_the_operators_disk(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        ann = next(node for node in nodes if node.name == "ann")
        identities = [node.identity for node in nodes]
        files = committed_checkpoint(hash_of(genesis_report(nodes[0].identity)), identities, 400_000)  # 10 MB in all
        await hold(ann, files)
        forged = checkpoint(nodes[1].identity, 10**9)  # newer than all, and nobody's but bob's
        await hold(next(node for node in nodes if node is not ann), forged)
        report = mb.RoundReport(round=files.name, committed=True, manifest=files.manifest, seconds=1)
        await ann.acknowledged(await ann.say(rounds=[report]))
        target = tmp_path / "pulled"
        pulling = asyncio.create_task(ctl(home, "pull", "--to", str(target), "--output", "json"))
        order = await ordered(ann)
        await upload(ann, files.messages(order.ticket, 1 << 20))
        result = await pulling
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["checkpoint"]["round"] == 1
        assert {path.name: path.read_bytes() for path in target.iterdir()} == files.files
        assert sum(path.stat().st_size for path in home.data_dir.rglob("*") if path.is_file()) < 2 << 20


async def test_parts_of_a_round_are_asked_for_together_and_come_together(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        target = tmp_path / "pulled"
        whole = committed_checkpoint(
            hash_of(genesis_report(nodes[0].identity)), [node.identity for node in nodes], 400_000
        )
        report = mb.RoundReport(round=whole.name, committed=True, manifest=whole.manifest, seconds=1)
        await nodes[0].acknowledged(await nodes[0].say(rounds=[report]))
        parts = [whole.part(0, 1), whole.part(2, 2)]
        await hold(nodes[0], parts[0])
        error = (await ctl(home, "pull", "--to", str(target))).exception
        assert isinstance(error, NotFound)
        assert "layer 2 of round 1" in str(error)
        await hold(nodes[1], parts[1])
        pulling = asyncio.create_task(ctl(home, "pull", "--to", str(target), "--output", "json"))
        pending_orders = [await ordered(node) for node in nodes]  # before either has answered
        for index in (1, 0):
            await upload(nodes[index], parts[index].messages(pending_orders[index].ticket, 1 << 20))
        result = await pulling
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["checkpoint"]["parts"] == ["layers-0-1", "layers-2-2"]
        for name, files in zip(("layers-0-1", "layers-2-2"), parts, strict=True):
            assert {path.name: path.read_bytes() for path in (target / name).iterdir()} == files.files


async def test_when_one_part_fails_the_others_end_and_nothing_is_left(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        ann, bob = nodes
        whole = checkpoint(ann.identity, elements=400_000)
        parts = [whole.part(0, 0), whole.part(1, 2)]
        for node, files in zip(nodes, parts, strict=True):
            await hold(node, files)
        pulling = asyncio.create_task(refused(home, tmp_path / "pulled"))
        pending_orders = [await ordered(node) for node in nodes]
        refusal = mb.CheckpointOpening(ticket=pending_orders[1].ticket, round=5, refusal="dropped it")
        await upload(bob, [mb.CheckpointUpload(opening=refusal)])
        assert str(await pulling).endswith("refused to send the checkpoint: dropped it")
        assert await refusal_of(ann, parts[0], pending_orders[0].ticket) is grpc.StatusCode.NOT_FOUND


async def test_the_list_outlives_a_restart(tmp_path: Path) -> None:
    data_dir = tmp_path / "c"
    async with training(data_dir, "ann", "bob") as (_, nodes):
        await hold(nodes[0], checkpoint(nodes[0].identity, 7))
        await hold(nodes[1], checkpoint(nodes[1].identity, 9))
        await hold(nodes[0], checkpoint(nodes[0].identity, 8))  # 7 is gone
    async with coordinator(data_dir, lost_after_seconds=600.0) as home:  # no news beside the JSON
        listed = json.loads((await ctl(home, "list", "--output", "json")).stdout)["checkpoints"]
        assert [(item["checkpoint"]["round"], item["connected"]) for item in listed] == [(9, False), (8, False)]
        result = await ctl(home, "pull", "--unverified", "--to", str(tmp_path / "x"))
        assert isinstance(result.exception, Unreachable)


async def refused(home: Coordinator, target: Path, *arguments: str) -> AtollError:
    result = await ctl(home, "pull", "--unverified", "--to", str(target), *arguments)
    assert isinstance(result.exception, AtollError), result.output
    assert not list(target.parent.glob("*pulled*"))
    return result.exception


async def test_the_cause_that_ends_a_pull_is_reported(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        ann, target = nodes[0], tmp_path / "pulled"
        files = checkpoint(ann.identity)
        assert isinstance(await refused(home, target), NotFound)
        await hold(ann, files)
        assert isinstance(await refused(home, target, "--round", "6"), NotFound)
        pulling = asyncio.create_task(refused(home, target))  # the node has dropped it
        order = await ordered(ann)
        refusal = mb.CheckpointOpening(ticket=order.ticket, round=5, refusal="dropped \x1b[31m it")
        await upload(ann, [mb.CheckpointUpload(opening=refusal)])
        assert str(await pulling).endswith("dropped [31m it")
        for messages, status, verdict in (
            (lambda ticket: files.messages(ticket)[:3], grpc.StatusCode.UNAVAILABLE, Unreachable),
            (lambda ticket: renamed(files, ticket), grpc.StatusCode.INVALID_ARGUMENT, PeerMisbehaved),
            (lambda ticket: other(ann, ticket), grpc.StatusCode.INVALID_ARGUMENT, PeerMisbehaved),
            (lambda ticket: forged(files, ticket), grpc.StatusCode.OK, CheckpointCorrupt),
        ):
            ann.heard.clear()
            pulling = asyncio.create_task(refused(home, target))
            order = await ordered(ann)
            assert await upload_status(ann, messages(order.ticket)) is status
            assert isinstance(await pulling, verdict)


async def upload_status(node: Node, messages: Iterable[mb.CheckpointUpload]) -> grpc.StatusCode:
    try:
        await upload(node, messages)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def renamed(files: Files, ticket: bytes) -> list[mb.CheckpointUpload]:
    """The opening alone: a client that still writes when it is refused is sometimes told only that writing failed."""
    opening = files.opening(ticket)
    opening.files[0].name = "../anchor"
    return [mb.CheckpointUpload(opening=opening)]


def other(node: Node, ticket: bytes) -> list[mb.CheckpointUpload]:
    return [mb.CheckpointUpload(opening=checkpoint(node.identity, 6).opening(ticket))]


def forged(files: Files, ticket: bytes) -> list[mb.CheckpointUpload]:
    """Wrong in the last piece: an operator who sees it earlier goes while the node still sends, or not, by chance."""
    messages = files.messages(ticket)
    messages[-1].data = b"\0" * len(messages[-1].data)
    return messages


async def test_a_node_that_disconnects_ends_the_pull_at_once(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        ann, bob = nodes
        await hold(ann, checkpoint(ann.identity, 5))
        pulling = asyncio.create_task(refused(home, tmp_path / "pulled"))
        await ordered(ann)
        await ann.close()  # before it began
        assert isinstance(await pulling, Unreachable)
        files = checkpoint(bob.identity, 9, elements=400_000)
        await hold(bob, files)
        pulling = asyncio.create_task(refused(home, tmp_path / "pulled"))
        order = await ordered(bob)
        begun = asyncio.Event()

        async def sending() -> AsyncIterator[mb.CheckpointUpload]:
            for message in files.messages(order.ticket, 1 << 20)[:4]:
                yield message
            begun.set()
            await asyncio.Event().wait()

        call = bob.stub.UploadCheckpoint(sending(), timeout=SECONDS)
        await asyncio.wait_for(begun.wait(), SECONDS)
        call.cancel()
        assert isinstance(await pulling, Unreachable)


async def refusal_of(node: Node, files: Files, ticket: bytes) -> grpc.StatusCode:
    """How an opening ends. It comes alone: who still writes when refused is sometimes told only that writing failed."""
    return await upload_status(node, [mb.CheckpointUpload(opening=files.opening(ticket))])


async def test_only_the_node_that_was_asked_may_answer(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        ann, bob = nodes
        files = checkpoint(ann.identity)
        await hold(ann, files)
        pulling = asyncio.create_task(ctl(home, "pull", "--unverified", "--to", str(tmp_path / "pulled")))
        order = await ordered(ann)
        for ticket in (order.ticket, b"x" * 16):
            assert await refusal_of(bob, files, ticket) is grpc.StatusCode.NOT_FOUND
        await upload(ann, files.messages(order.ticket))
        assert (await pulling).exit_code == 0


async def test_an_operator_that_disconnects_ends_the_upload(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        ann = nodes[0]
        files = checkpoint(ann.identity)
        await hold(ann, files)
        size = 200  # MiB: more than fits into what lies between the two
        call = home.admin.PullCheckpoint(admin.PullCheckpointRequest(unverified=True), timeout=SECONDS)
        order = await ordered(ann)
        opening = files.opening(order.ticket)
        opening.files[0].bytes = (size << 20) - sum(item.bytes for item in opening.files[1:])
        messages = [mb.CheckpointUpload(opening=opening), *[mb.CheckpointUpload(data=bytes(1 << 20))] * size]
        uploading = asyncio.create_task(upload_status(ann, messages))
        assert (await call.read()).opening.round == 5
        call.cancel()
        status = await asyncio.wait_for(uploading, SECONDS)
        assert status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)  # the latter where a write crossed it


async def test_a_large_set_is_relayed_a_few_parts_at_a_time(tmp_path: Path) -> None:
    """Without a network: nodes are what answers orders."""
    count = MAX_CONCURRENT_PARTS + 3
    files = checkpoint(Identity.generate())
    wanted = [Checkpoint(f"peer-{part}", 5, "reef", b"h", 1, 0, 0, part, part) for part in range(count)]
    named = {item.peer_id: SimpleNamespace(name=item.peer_id, banned=False) for item in wanted}
    live = {item.peer_id: SimpleNamespace(connected=True) for item in wanted}
    asked = asyncio.Event()
    uploads = CheckpointRelay(SimpleNamespace(notify=asked.set, state=SimpleNamespace(nodes=named, live=live)))  # type: ignore[arg-type]
    passed: list[mb.CheckpointUpload] = []
    checked: list[str] = []

    async def write(message: mb.CheckpointUpload) -> None:
        passed.append(message)

    async def sent(ticket: bytes) -> AsyncIterator[mb.CheckpointUpload]:
        for message in files.messages(ticket):
            yield message

    pulling = asyncio.create_task(uploads.pull(wanted, lambda item, _: checked.append(item.peer_id), write))
    async with asyncio.timeout(SECONDS):
        for _ in range(count):
            while not (
                open_ := {name: pending_orders[0] for name in named if (pending_orders := uploads.pending_orders(name))}
            ):
                asked.clear()
                await asyncio.wait((asyncio.create_task(asked.wait()), pulling), return_when=asyncio.FIRST_COMPLETED)
            assert len(open_) <= MAX_CONCURRENT_PARTS
            name, order = open_.popitem()
            await uploads.receive_upload(name, sent(order.ticket))
        await pulling
    assert sorted(checked) == sorted(named)
    for part in range(count):
        mine = [message for message in passed if message.part == part]
        assert mine[0].opening.parts == count
        assert [message.data for message in mine[1:]] == [message.data for message in files.messages()[1:]]


async def test_the_slower_side_sets_the_pace() -> None:
    upload = RelayedUpload("peer", 1)
    messages = [mb.CheckpointUpload(data=bytes([number])) for number in range(12)]

    async def send() -> None:
        for message in messages:
            await upload.put(message)
        upload.end()

    sending = asyncio.create_task(send())
    for number, message in enumerate(messages):
        for _ in range(20):  # as often as the sender could want to run
            await asyncio.sleep(0)
        assert sending.done() is (number >= len(messages) - MAX_BUFFERED_MESSAGES)
        assert await upload.get() == message
    assert await upload.get() is None
    await sending
