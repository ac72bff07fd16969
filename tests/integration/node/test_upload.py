"""Upload of a node's checkpoint to an operator, through a real coordinator."""

import asyncio
import shutil
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
from integration.coordinator.lab import SECONDS
from integration.coordinator.test_checkpoints import ctl, hold, ordered
from integration.coordinator.test_membership import training
from support.small_state import of_vectors
from unit.coordinator.model_files import checkpoint as announced
from unit.coordinator.world import LAYERS, RUN, spec_toml

from atoll.core.errors import NotFound
from atoll.core.run_spec import parse_run_spec
from atoll.node.control.checkpoint_upload import CheckpointUploads, upload
from atoll.node.export.stored_model import checkpoints_in, join_checkpoints, open_checkpoint
from atoll.node.state.checkpoint import CheckpointState, CheckpointStore, read_checkpoint
from atoll.node.state.tensor_file import LayerLayout
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import membership_pb2 as mb

SPEC = parse_run_spec(spec_toml())
NAMES = tuple(LAYERS)


def store_with(directory, number: int, elements: int) -> CheckpointStore:
    layers = LayerLayout(NAMES, tuple(index * elements for index in range(len(NAMES) + 1)))
    store = CheckpointStore(directory, SPEC, keep=1)
    anchor_E = torch.rand(layers.elements)
    store.write(of_vectors(number, anchor_E, -anchor_E, layers, RUN))
    return store


@pytest.mark.parametrize("elements", [1, 700_001])  # the larger: several messages, and a ragged end
async def test_the_operator_receives_the_nodes_checkpoint_unchanged(tmp_path, elements):
    store = store_with(tmp_path / "node", 5, elements)
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        ann = nodes[0]
        await ann.acknowledged(await ann.say(checkpoints=store.held(), checkpoints_changed=True))
        pulling = asyncio.create_task(ctl(home, "pull", "--unverified", "--to", str(tmp_path / "pulled")))
        await upload(ann.stub, await ordered(ann), store.path(5))
        result = await pulling
        assert result.exit_code == 0, result.output
    pulled, ours = read_checkpoint(tmp_path / "pulled"), read_checkpoint(store.path(5))
    assert torch.equal(pulled.anchor_E, ours.anchor_E)
    assert {path.name: path.read_bytes() for path in (tmp_path / "pulled").iterdir()} == {
        path.name: path.read_bytes() for path in store.path(5).iterdir()
    }


async def test_the_checkpoints_of_all_stages_load_as_one_model(tmp_path):
    elements = 200_001
    offsets = tuple(index * elements for index in range(len(NAMES) + 1))
    layers, anchor_E = LayerLayout(NAMES, offsets), torch.rand(offsets[-1])
    whole = of_vectors(5, anchor_E, -anchor_E, layers, RUN)
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        stores = []
        for node, numbers in zip(nodes, (slice(0, 1), slice(1, 3)), strict=True):
            where = slice(offsets[numbers.start], offsets[numbers.stop])
            part = CheckpointState(whole.head, layers.part(numbers), anchor_E[where], -anchor_E[where])
            stores.append(CheckpointStore(tmp_path / node.name, SPEC, keep=1))
            stores[-1].write(part)
            await node.acknowledged(await node.say(checkpoints=stores[-1].held(), checkpoints_changed=True))
        pulling = asyncio.create_task(ctl(home, "pull", "--unverified", "--to", str(tmp_path / "pulled")))
        for node, store in zip(nodes, stores, strict=True):
            await upload(node.stub, await ordered(node), store.path(5))
        assert (await pulling).exit_code == 0
    with ExitStack() as held:
        model = join_checkpoints([open_checkpoint(path, held) for path in checkpoints_in(tmp_path / "pulled")])
        found = [model.read(start, end) for start, end in pairwise(model.layers.offsets)]
    assert torch.equal(torch.cat(found), anchor_E)


@pytest.mark.parametrize("damage", ["gone", "manifest", "SHA256SUMS", "anchor.safetensors"])
async def test_a_missing_or_damaged_checkpoint_is_refused_with_a_reason(tmp_path, damage):
    store = store_with(tmp_path / "node", 5, 10)
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        ann = nodes[0]
        await hold(ann, announced(ann.identity, 5))
        pulling = asyncio.create_task(ctl(home, "pull", "--unverified", "--to", str(tmp_path / "pulled")))
        order = await ordered(ann)
        if damage == "gone":
            shutil.rmtree(store.path(5))
        else:
            (store.path(5) / damage).unlink()
        await upload(ann.stub, order, store.path(5))
        result = await pulling
        assert isinstance(result.exception, NotFound)
        assert "missing or damaged on this node" in str(result.exception)
    assert not (tmp_path / "pulled").exists()


async def test_an_upload_goes_on_while_the_next_checkpoint_replaces_it(tmp_path):
    """With keep=1 the files are deleted between the opening and the last byte."""
    store = store_with(tmp_path / "node", 5, 700_001)
    before = read_checkpoint(store.path(5))

    class Removing:
        def UploadCheckpoint(self):
            self.call = ann.stub.UploadCheckpoint()
            return self

        def __getattr__(self, name):
            return getattr(self.call, name)

        def __await__(self):
            return self.call.__await__()

        async def write(self, message):
            await self.call.write(message)
            shutil.rmtree(store.path(5), ignore_errors=True)

    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        ann = nodes[0]
        await ann.acknowledged(await ann.say(checkpoints=store.held(), checkpoints_changed=True))
        pulling = asyncio.create_task(ctl(home, "pull", "--unverified", "--to", str(tmp_path / "pulled")))
        await upload(Removing(), await ordered(ann), store.path(5))
        assert (await pulling).exit_code == 0
    assert torch.equal(read_checkpoint(tmp_path / "pulled").momentum_E, before.momentum_E)


async def test_an_operator_that_disconnects_ends_the_upload_without_an_error(tmp_path):
    store = store_with(tmp_path / "node", 5, 6_000_000)  # more than fits between the two
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        ann = nodes[0]
        await ann.acknowledged(await ann.say(checkpoints=store.held(), checkpoints_changed=True))
        call = home.admin.PullCheckpoint(admin.PullCheckpointRequest(unverified=True), timeout=SECONDS)
        sending = asyncio.create_task(upload(ann.stub, await ordered(ann), store.path(5)))
        assert (await call.read()).opening.round == 5
        call.cancel()
        await asyncio.wait_for(sending, SECONDS)


async def test_each_order_is_carried_out_once_and_two_at_a_time():
    running, most, done, gate = 0, 0, [], asyncio.Event()

    async def send(order: mb.UploadOrder) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1
        done.append(order.ticket)

    uploads = CheckpointUploads(send)
    orders = [mb.UploadOrder(ticket=bytes([number]) * 16, round=1) for number in range(5)]
    for _ in range(3):  # each heartbeat repeats them
        uploads.take(orders)
        await asyncio.sleep(0)
    gate.set()
    async with asyncio.timeout(60):
        while len(done) < 5:
            await asyncio.sleep(0.001)
    assert sorted(done) == [order.ticket for order in orders]
    assert most == 2
    await uploads.close()


async def test_close_cancels_the_uploads_under_way():
    broken = asyncio.Event()

    async def send(order: mb.UploadOrder) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            broken.set()

    uploads = CheckpointUploads(send)
    uploads.take([mb.UploadOrder(ticket=b"t" * 16, round=1)])
    await asyncio.sleep(0)
    await asyncio.wait_for(uploads.close(), 60)
    assert broken.is_set()
