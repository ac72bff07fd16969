"""A trainer's process that was started before anybody knew what it is to train."""

import asyncio
import errno
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from support.process_swarm import MODEL, SPEC

from atoll.core.errors import ChildDied, DataDirUnusable, DeadlineExceeded, RunSpecError
from atoll.node.trainer.trainer import Trainer, TrainerConfig
from atoll.node.trainer.trainer_process import TrainerProcess

DEADLINE = timedelta(seconds=120)

pytestmark = pytest.mark.timeout(600)


def open_files() -> set[str]:
    return {f"{entry.name} {os.readlink(entry)}" for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}


async def has_torch(pid: int) -> None:
    """Wait until that process has mapped torch's library."""
    async with asyncio.timeout(DEADLINE.total_seconds()):
        while not any("libtorch" in Path(found.path).name for found in psutil.Process(pid).memory_maps()):
            await asyncio.sleep(0.05)


def config(tmp_path: Path) -> TrainerConfig:
    text = tmp_path / "corpus.txt"
    text.write_text("a reef grows where nobody looks\n" * 2000)
    spec = SPEC.format(model=MODEL, nodes=1, tokens=10**6, corpus=text, round_tokens=1000, codec="fp32")
    return TrainerConfig(spec, device="cpu")


async def test_it_imports_torch_before_it_is_told_anything_and_trains_what_it_is_told_then(tmp_path: Path) -> None:
    child = await TrainerProcess.start(tmp_path / "log")
    await has_torch(child.process.pid)
    trainer = await Trainer.take(child, config(tmp_path), timeout=DEADLINE)
    try:
        assert trainer.pid == child.process.pid
        await trainer.initialise()
        await trainer.load(ranges=((0, 100),), committed_tokens=0)
        await trainer.train()
        async with asyncio.timeout(DEADLINE.total_seconds()):
            while not trainer.status.steps:
                await asyncio.sleep(0.02)
        await child.end()  # of one that is taken: nothing
        await trainer.pause()
    finally:
        await trainer.stop(DEADLINE)


async def test_one_that_nobody_took_ends_and_leaves_nothing(tmp_path: Path) -> None:
    before = open_files()
    child = await TrainerProcess.start(tmp_path / "log")
    await child.end()
    await child.end()
    assert child.process.returncode == -signal.SIGKILL
    assert not psutil.pid_exists(child.process.pid)
    assert open_files() == before


async def test_one_that_died_while_it_waited_is_a_trainer_that_died(tmp_path: Path) -> None:
    before = open_files()
    child = await TrainerProcess.start(tmp_path / "log")
    await has_torch(child.process.pid)
    os.kill(child.process.pid, signal.SIGKILL)
    with pytest.raises(ChildDied, match="killed by signal 9"):
        await Trainer.take(child, config(tmp_path), timeout=DEADLINE)
    assert open_files() == before


async def feed(fifo: Path) -> None:
    """Some text for who has opened it."""
    while True:
        try:
            descriptor = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError as error:
            if error.errno != errno.ENXIO:  # nobody has opened it yet
                raise
            await asyncio.sleep(0.02)
    os.write(descriptor, b"a reef grows where nobody looks\n" * 500)
    os.close(descriptor)


def slow_corpus(tmp_path: Path) -> tuple[TrainerConfig, list[Path]]:
    """Of files that have something to read when the test says so."""
    fifos = [tmp_path / "corpus" / f"{number}.txt" for number in range(6)]
    fifos[0].parent.mkdir(parents=True)
    for fifo in fifos:
        os.mkfifo(fifo)
    return replace(config(tmp_path), corpus_path=str(fifos[0].parent)), fifos


async def loads_slowly(tmp_path: Path, silence: timedelta) -> list[int]:
    """What a child told while it loaded for longer than it may be silent. Raises `DeadlineExceeded`."""
    slow, fifos = slow_corpus(tmp_path)
    child = await TrainerProcess.start(tmp_path / "log")
    await has_torch(child.process.pid)
    heard: list[int] = []
    taking = asyncio.create_task(
        Trainer.take(child, slow, timeout=silence, on_progress=lambda loading: heard.append(loading.tokens))
    )
    for fifo in fifos:
        await asyncio.wait([taking], timeout=silence.total_seconds() / 4)
        feeding = asyncio.create_task(feed(fifo))
        await asyncio.wait([taking, feeding], return_when=asyncio.FIRST_COMPLETED)
        feeding.cancel()
    trainer = await taking
    await trainer.stop(DEADLINE)
    return heard


@pytest.mark.timeout(900)
async def test_a_corpus_may_take_longer_than_a_child_may_be_silent(tmp_path: Path) -> None:
    heard: list[int] = []
    for seconds in (6, 24, 96):  # a machine that is busy may stop a child for that long
        with suppress(DeadlineExceeded):
            heard = await loads_slowly(tmp_path / str(seconds), timedelta(seconds=seconds))
            break
    assert heard == sorted(heard)
    assert len(set(heard) - {0}) > 1


async def test_a_child_that_hangs_while_it_loads_is_given_up(tmp_path: Path) -> None:
    slow, _ = slow_corpus(tmp_path)
    child = await TrainerProcess.start(tmp_path / "log")
    os.kill(child.process.pid, signal.SIGSTOP)  # a read that takes long would tell that the child is alive
    async with asyncio.timeout(DEADLINE.total_seconds()):
        with pytest.raises(DeadlineExceeded, match="no loading progress"):
            await Trainer.take(child, slow, timeout=timedelta(seconds=2))
    assert not psutil.pid_exists(child.process.pid)


async def test_a_refusal_leaves_nothing(tmp_path: Path) -> None:
    before = open_files()
    child = await TrainerProcess.start(tmp_path / "log")
    with pytest.raises(RunSpecError):
        await Trainer.take(child, TrainerConfig("version = 7\n", device="cpu"), timeout=DEADLINE)
    assert not psutil.pid_exists(child.process.pid)
    assert open_files() == before


async def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    before = open_files()
    with pytest.raises(DataDirUnusable, match="trainer's log"):
        await TrainerProcess.start(tmp_path / "nowhere" / "log")
    assert open_files() == before


async def test_it_dies_with_its_parent_before_anybody_took_it(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    program = (
        "import asyncio, pathlib, sys\n"
        "from atoll.node.trainer.trainer_process import TrainerProcess\n"
        "async def main():\n"
        "    child = await TrainerProcess.start(pathlib.Path(sys.argv[1]))\n"
        "    pathlib.Path(sys.argv[2]).write_text(str(child.process.pid))\n"
        "    assert 'torch' not in sys.modules\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(tmp_path / "log"), str(told), stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(DEADLINE.total_seconds()):
        while not told.exists() or not told.read_text():
            assert parent.returncode is None, await parent.stderr.read()
            await asyncio.sleep(0.02)
        pid = int(told.read_text())
        assert psutil.pid_exists(pid)
        parent.kill()
        await parent.wait()
        with suppress(psutil.NoSuchProcess):
            while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.02)
