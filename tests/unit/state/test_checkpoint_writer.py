"""Checkpoints are written beside the rounds, now and then, and on leaving within a deadline."""

import asyncio
import errno
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support.power_cut import FailingDisk
from support.small_state import LAYERS, SPEC, state_of
from unit.coordinator.world import World

from atoll.core.disk import OsDisk
from atoll.core.errors import DataDirUnusable, DeadlineExceeded
from atoll.node.state.checkpoint import CheckpointStore
from atoll.node.state.checkpoint_writer import CheckpointWriter

SOON = timedelta(seconds=60)


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def unix(self) -> float:
        return self.now


class GatedDisk(OsDisk):
    """Makes no directory until the gate is open."""

    def __init__(self) -> None:
        self.reached, self.gate = threading.Event(), threading.Event()

    def mkdir(self, path: Path, mode: int = 0o755) -> None:
        self.reached.set()
        assert self.gate.wait(60)
        super().mkdir(path, mode)


@pytest.fixture
def clock():
    return HandClock()


def make(directory, clock, **more) -> CheckpointWriter:
    return CheckpointWriter(CheckpointStore(directory, SPEC, keep=3, **more), timedelta(seconds=60), clock)


async def written(writer: CheckpointWriter, *rounds: int) -> None:
    async with asyncio.timeout(60):
        while tuple(info.round for info in writer.held()) != rounds:
            await asyncio.sleep(0.005)


async def test_the_first_is_written_and_then_the_first_of_every_interval(tmp_path, clock):
    writer = make(tmp_path, clock)
    assert await writer.restore(LAYERS) is None
    writer.offer(state_of(1, seconds=130))
    await written(writer, 1)
    clock.now += 49
    writer.offer(state_of(2, seconds=179))
    clock.now += 1
    writer.offer(state_of(3, seconds=180))
    await written(writer, 3, 1)
    again = make(tmp_path, clock)
    found = await again.restore(LAYERS)
    assert found.head.round == 3
    assert [info.round for info in again.held()] == [3, 1]


async def idle(writer: CheckpointWriter) -> None:
    async with asyncio.timeout(60):
        while writer._background is not None:
            await asyncio.sleep(0.001)


async def test_nodes_that_began_at_other_times_write_the_same_rounds(tmp_path, clock):
    writers = [make(tmp_path / "ann", clock), make(tmp_path / "bob", clock)]
    for number in range(1, 60):
        clock.now += 5
        for writer in writers[: 1 if number < 9 else 2]:
            writer.offer(state_of(number, seconds=7 * 60 + 5 * number))
            await idle(writer)
    ann, bob = ([info.round for info in writer.held()] for writer in writers)
    assert ann == bob == [48, 36, 24]


async def test_rounds_that_tell_a_wrong_time_make_few_checkpoints_but_some(tmp_path, clock):
    jumps, stands = make(tmp_path / "jumps", clock), make(tmp_path / "stands", clock)
    began = {jumps: 0, stands: 0}
    for number in range(1, 121):  # ten minutes
        clock.now += 5
        for writer, seconds in ((jumps, 1e6 * number), (stands, 0)):
            writer.offer(state_of(number, seconds=seconds))
            began[writer] += writer._background is not None
            await idle(writer)
    assert began[jumps] <= 4 * 10 + 1
    assert began[stands] >= 10 / 2


async def test_an_ordered_one_is_written_at_once_and_only_once(tmp_path, clock):
    writer = make(tmp_path, clock)
    writer.offer(state_of(1, seconds=60))
    await written(writer, 1)
    writer.order(0, state_of(2, seconds=61))
    assert writer._background is None
    for _ in range(3):
        writer.order(2, state_of(2, seconds=61))
    await written(writer, 2, 1)
    await idle(writer)
    writer.order(2, state_of(3, seconds=62))
    writer.offer(state_of(4, seconds=63))
    assert writer._background is None  # the order is fulfilled


async def test_an_order_for_a_round_to_come_waits_for_it(tmp_path, clock):
    writer = make(tmp_path, clock)
    writer.offer(state_of(1, seconds=60))
    await written(writer, 1)
    writer.order(3, state_of(1, seconds=60))
    writer.offer(state_of(2, seconds=61))
    assert writer._background is None
    writer.offer(state_of(3, seconds=62))
    await written(writer, 3, 1)


async def test_an_order_during_another_write_is_followed_after_it(tmp_path, clock):
    disk = GatedDisk()
    writer = make(tmp_path, clock, disk=disk)
    writer.offer(state_of(1, seconds=60))
    assert await asyncio.to_thread(disk.reached.wait, 60)
    writer.order(2, state_of(2, seconds=61))
    disk.gate.set()
    await written(writer, 2, 1)


async def test_a_round_that_is_offered_during_an_ordered_write_is_not_written_too(tmp_path, clock):
    disk = GatedDisk()
    writer = make(tmp_path, clock, disk=disk)
    writer.order(5, state_of(5, seconds=60))
    writer.offer(state_of(6, seconds=61))  # before the write began
    assert await asyncio.to_thread(disk.reached.wait, 60)
    writer.order(5, state_of(7, seconds=62))
    writer.offer(state_of(7, seconds=62))
    disk.gate.set()
    await idle(writer)
    assert [info.round for info in writer.held()] == [5]


async def test_a_newer_order_during_an_ordered_write_is_followed(tmp_path, clock):
    disk = GatedDisk()
    writer = make(tmp_path, clock, disk=disk)
    writer.order(5, state_of(5, seconds=60))
    assert await asyncio.to_thread(disk.reached.wait, 60)
    writer.order(6, state_of(6, seconds=61))
    disk.gate.set()
    await written(writer, 6, 5)


async def test_checkpoints_of_a_history_that_a_recovery_made_void_do_not_fulfil_an_order(tmp_path, clock):
    writer = make(tmp_path, clock)
    writer.offer(state_of(190, seconds=60))
    await written(writer, 190)
    writer.order(150, state_of(150, seconds=61))
    await written(writer, 150)
    await idle(writer)
    writer.order(150, state_of(151, seconds=62))
    assert writer._background is None


async def test_an_order_does_not_take_the_place_of_the_intervals_checkpoints(tmp_path, clock):
    writer = make(tmp_path, clock)
    for minute in range(1, 4):
        clock.now += 60
        writer.offer(state_of(10 * minute, seconds=60 * minute))
        await idle(writer)
        writer.order(10 * minute, state_of(10 * minute, seconds=60 * minute))  # is there already
        await idle(writer)
    for number in range(31, 36):
        writer.order(number, state_of(number, seconds=181))
        await idle(writer)
    assert [info.round for info in writer.held()] == [35, 34, 30, 20, 10]


async def test_a_failed_ordered_write_is_told_and_the_next_round_is_tried(tmp_path, clock):
    writer = make(tmp_path, clock, disk=FailingDisk(3, errno.ENOSPC))
    writer.order(1, state_of(1, seconds=60))
    await idle(writer)
    assert writer.problem
    writer.order(1, state_of(1, seconds=60))
    assert writer._background is None  # each state is tried once
    writer.offer(state_of(2, seconds=61))
    await written(writer, 2)


async def test_rounds_go_on_while_one_is_written_and_change_nothing_in_it(tmp_path, clock):
    disk = GatedDisk()
    writer = make(tmp_path, clock, disk=disk)
    state = state_of(1)
    writer.offer(state)
    assert await asyncio.to_thread(disk.reached.wait, 60)
    state.anchor_E.fill_(666.0)  # the next commit, in place
    state.momentum_E.fill_(666.0)
    clock.now += 1000
    writer.offer(state_of(2))  # one is being written: nothing happens
    disk.gate.set()
    await written(writer, 1)
    assert torch.equal((await writer.restore(LAYERS)).anchor_E, state_of(1).anchor_E)


async def test_what_nobody_else_holds_is_written_every_time_and_next_if_one_is_being_written(tmp_path, clock):
    disk = GatedDisk()
    writer = make(tmp_path, clock, disk=disk)
    writer.offer(state_of(1))
    assert await asyncio.to_thread(disk.reached.wait, 60)
    writer.offer(state_of(2), only_copy=True)
    writer.offer(state_of(3), only_copy=True)
    disk.gate.set()
    await written(writer, 3, 1)
    writer.offer(state_of(4))
    writer.offer(state_of(5), only_copy=True)
    await written(writer, 5, 3, 1)


async def test_a_round_of_other_layers_does_not_take_the_only_copy_s_turn(tmp_path, clock):
    disk = GatedDisk()
    writer = make(tmp_path, clock, disk=disk)
    writer.offer(state_of(1))
    assert await asyncio.to_thread(disk.reached.wait, 60)
    writer.offer(state_of(2), only_copy=True)
    writer.offer(state_of(3))  # only witnessed: what is ours is as it was in round 2
    disk.gate.set()
    await written(writer, 3, 1)


async def test_a_state_that_moved_during_the_copy_is_not_written_and_the_next_one_is(tmp_path, clock):
    writer = make(tmp_path, clock)
    torn = state_of(1)
    torn.anchor_E[3] += 1
    writer.offer(torn)
    async with asyncio.timeout(60):
        while not writer.held():
            writer.offer(state_of(2))  # at once, not an interval later
            await asyncio.sleep(0.005)
    assert [info.round for info in writer.held()] == [2]


async def test_a_full_disk_is_a_problem_and_another_try_an_interval_later(tmp_path, clock):
    writer = make(tmp_path, clock)
    writer.offer(state_of(1))
    await written(writer, 1)
    full = make(tmp_path, clock, disk=FailingDisk(3, errno.ENOSPC))
    full.offer(state_of(2))
    async with asyncio.timeout(60):
        while not full.problem:
            await asyncio.sleep(0.005)
    full.offer(state_of(3))
    assert full.problem
    clock.now += 60
    full.offer(state_of(4, seconds=60))  # by now there is room
    await written(full, 4, 1)
    assert full.problem == ""


async def test_leaving_writes_the_newest_state_even_when_none_is_due(tmp_path, clock):
    writer = make(tmp_path, clock)
    writer.offer(state_of(1))
    path = await writer.flush(state_of(2), SOON)
    assert path == tmp_path / "000000002"
    assert [info.round for info in writer.held()] == [2, 1]
    assert await writer.flush(state_of(2), SOON) == path  # which it has


async def test_leaving_has_a_deadline_and_says_what_is_wrong(tmp_path, clock):
    disk = GatedDisk()
    writer = make(tmp_path, clock, disk=disk)
    with pytest.raises(DeadlineExceeded):
        await writer.flush(state_of(1), timedelta(milliseconds=50))
    disk.gate.set()
    with pytest.raises(DataDirUnusable):
        await make(tmp_path, clock, disk=FailingDisk(0, errno.EROFS)).flush(state_of(2), SOON)


async def test_closing_gives_up_and_leaves_no_half(tmp_path, clock):
    disk = GatedDisk()
    writer = make(tmp_path, clock, disk=disk)
    writer.offer(state_of(1))
    assert await asyncio.to_thread(disk.reached.wait, 60)
    closing = asyncio.create_task(writer.close())
    await asyncio.wait_for(closing, 60)
    disk.gate.set()
    assert await make(tmp_path, clock).restore(LAYERS) is None


async def test_the_coordinator_hears_of_as_many_of_the_newest_as_it_takes(tmp_path, clock):
    """A node that keeps a hundred used to be refused with every heartbeat that told of them."""
    store = CheckpointStore(tmp_path, SPEC, keep=100)
    for number in range(1, 71):
        store.write(state_of(number))
    writer = CheckpointWriter(store, timedelta(seconds=60), clock)
    await writer.restore(LAYERS)
    told = [info.round for info in writer.held()]
    assert told == list(range(70, 6, -1))
    world = World()
    world.train("ann", "bob")
    world.say("ann", checkpoints_changed=True, checkpoints=writer.held())
    held = world.state.checkpoints[world.identities["ann"].peer_id]
    assert [item.round for item in held] == told
    writer.offer(state_of(71))
    await written(writer, *range(71, 7, -1))


async def test_rounds_in_between_do_not_displace_those_that_all_nodes_write(tmp_path, clock):
    writer = make(tmp_path, clock)
    for number in range(1, 50):
        clock.now += 5
        writer.offer(state_of(number, seconds=5 * number), only_copy=True)
        await idle(writer)
    assert [info.round for info in writer.held()] == [49, 48, 47, 36, 24]
