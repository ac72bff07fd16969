"""The trainer as a process: it works while asked, dies with its parent, and its death is an error one can catch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
from support.eventually import eventually

from atoll.core.errors import CheckpointCorrupt, ChildDied, CorpusError, DeadlineExceeded, InvalidTransition
from atoll.core.run_spec import parse_run_spec
from atoll.node.model.run_model import run_model
from atoll.node.system.host_memory import HOST_OVERHEAD_BYTES
from atoll.node.trainer import messages
from atoll.node.trainer.trainer import Snapshot, Trainer, TrainerConfig, TrainerStatus
from atoll.node.trainer.worker import EXIT_ORPHANED

SPEC = """
version = 1
[run]
name = "t"
stop_tokens = 100000
[model]
dimension = 32
layers = 2
heads = 4
kv_heads = 2
hidden_dimension = 48
[data]
path = "overridden"
sequence_length = 16
validation_samples = 8
[optimizer]
name = "adamw"
learning_rate = 0.01
[sync]
round_tokens = 1000
"""
DEADLINE = timedelta(seconds=180)
STEP_SECONDS = 0.02
TOKENS_PER_STEP = 4 * 16


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("a reef is a ring of islands; " * 200)
    return path


@contextlib.asynccontextmanager
async def trainer_on(text: Path, pace: float = STEP_SECONDS, share: float = 1.0) -> AsyncIterator[Trainer]:
    config = TrainerConfig(SPEC, str(text), device="cpu", minimum_step_seconds=pace, compute_share=share)
    trainer = await Trainer.spawn(config, log_path=text.parent / "trainer.log", timeout=DEADLINE)
    try:
        yield trainer
    finally:
        await trainer.stop(DEADLINE)
        assert not psutil.pid_exists(trainer.pid)


async def test_a_trainer_with_a_share_of_the_time_leaves_the_rest_to_others(text: Path) -> None:
    async with trainer_on(text, pace=0.0, share=0.2) as trainer:
        await trainer.initialise()
        await trainer.load(ranges=((0, 4000),), committed_tokens=0)
        await trainer.train()
        await eventually(lambda: trainer.status.steps >= 5)
        process = psutil.Process(trainer.pid)
        began, before, steps = time.monotonic(), sum(process.cpu_times()[:2]), trainer.status.steps
        await eventually(lambda: trainer.status.steps >= steps + 40)
        computed, passed = sum(process.cpu_times()[:2]) - before, time.monotonic() - began
        assert computed < 0.6 * passed  # without rests: more than 0.9 of it


async def test_a_round_in_the_life_of_a_trainer(text: Path) -> None:
    async with trainer_on(text) as trainer:
        facts = trainer.facts
        assert facts.layer_offsets[-1] == facts.elements == trainer.anchor.numel()
        assert facts.tokens_per_step == TOKENS_PER_STEP
        assert 0 < facts.tokens_per_second <= TOKENS_PER_STEP / STEP_SECONDS  # the pace is measured, not told
        with pytest.raises(InvalidTransition):
            await trainer.train()

        await trainer.initialise()
        genesis = trainer.anchor.clone()
        await trainer.load(ranges=(), committed_tokens=0)  # a joiner without ranges does not train
        await trainer.train()
        assert await trainer.snapshot() == Snapshot()
        first_loss = (await trainer.evaluate()).value

        await trainer.load(ranges=((0, 4000),), committed_tokens=0)
        await eventually(lambda: trainer.status.steps >= 20)
        assert trainer.status.step_seconds >= 0.9 * STEP_SECONDS
        snapshot = await trainer.snapshot()
        steps = trainer.status.steps
        frozen = trainer.pseudo_gradient.clone()
        assert snapshot.tokens == snapshot.steps * TOKENS_PER_STEP == snapshot.samples * 16
        await eventually(lambda: trainer.status.steps >= steps + 3)  # training goes on during the exchange
        assert torch.equal(trainer.pseudo_gradient, frozen)

        trainer.anchor.copy_(genesis - frozen)
        await trainer.apply(ranges=((snapshot.samples, 4000),), committed_tokens=snapshot.tokens)
        await trainer.pause()
        paused = trainer.status
        assert not paused.training
        assert paused.progress_tokens == (paused.steps - snapshot.steps) * TOKENS_PER_STEP
        second = await trainer.snapshot()
        assert (second.tokens, second.steps) == (paused.progress_tokens, paused.steps - snapshot.steps)
        trainer.anchor.sub_(trainer.pseudo_gradient)
        await trainer.apply(ranges=((snapshot.samples + second.samples, 4000),), committed_tokens=1000)
        assert await trainer.snapshot() == Snapshot()
        assert float(trainer.pseudo_gradient.abs().max()) < 1e-6  # the carry of a paused node is nothing
        await trainer.discard()

        assert (await trainer.evaluate()).value < first_loss - 0.5
        sample = await trainer.generate("a reef", 20, seed=3)
        assert sample == await trainer.generate("a reef", 20, seed=3)
        with pytest.raises(DeadlineExceeded):
            await trainer.evaluate(timeout=timedelta(0))  # sooner than any answer
    assert trainer.died.result().returncode == 0


async def test_a_child_that_is_killed_is_an_error_for_whoever_waits(text: Path) -> None:
    async with trainer_on(text) as trainer:
        os.kill(trainer.pid, signal.SIGINT)  # for the parent to decide
        os.kill(trainer.pid, signal.SIGTERM)
        await trainer.initialise()
        waiting = asyncio.create_task(trainer.generate("a", 1_000_000))
        await asyncio.sleep(0)
        os.kill(trainer.pid, signal.SIGKILL)
        with pytest.raises(ChildDied, match="signal 9"):
            await waiting
        assert (await trainer.died).returncode == -signal.SIGKILL
        with pytest.raises(ChildDied):
            await trainer.train()


async def test_an_order_that_is_cancelled_while_its_answer_comes_in_is_cancelled(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the loop that gave it would go on, and a daemon that was told to stop would never end."""
    async with trainer_on(text) as trainer:
        order = asyncio.create_task(trainer.discard())
        parse = messages.Envelope.parse

        def cancel_first(line: bytes) -> messages.Envelope:
            envelope = parse(line)
            if not isinstance(envelope.body, TrainerStatus):
                order.cancel()
            return envelope

        monkeypatch.setattr(messages.Envelope, "parse", cancel_first)
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(DEADLINE.total_seconds()):
                await order
        monkeypatch.undo()
        await trainer.pause()


async def test_errors_of_the_child_arrive_with_their_type(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(CorpusError, match="is empty") as caught:
        await Trainer.spawn(TrainerConfig(SPEC, str(empty)), log_path=tmp_path / "log", timeout=DEADLINE)
    assert caught.value.remedy


PARENT = """
import asyncio, sys
from datetime import timedelta
from pathlib import Path
from atoll.node.trainer.trainer import Trainer, TrainerConfig

async def main():
    spec, text, log = sys.argv[1:]
    for span in (None, (0, 1)):
        config = TrainerConfig(spec, text, span=span)
        trainer = await Trainer.spawn(config, log_path=Path(log), timeout=timedelta(seconds=180))
        await trainer.initialise()
        await trainer.load(ranges=((0, 4000),), committed_tokens=0)
        await trainer.train()
        print(trainer.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_trainer_does_not_outlive_its_parent_with_the_whole_model_or_a_span(text: Path) -> None:
    command = [sys.executable, "-c", PARENT, SPEC, str(text), str(text.parent / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(parent.stdout.readline())) for _ in range(2)]
        assert all(child.is_running() for child in children)
        parent.kill()
    deadline = time.monotonic() + DEADLINE.total_seconds()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            while child.status() != psutil.STATUS_ZOMBIE:  # nobody may be there to reap it
                assert time.monotonic() < deadline, "the trainer lives on"
                time.sleep(0.01)


def test_a_trainer_whose_control_socket_closes_ends_itself() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "atoll.node.trainer.worker", f"--control-fd={theirs.fileno()}"]
    command += ["--anchor-fd=0", "--gradient-fd=0", f"--parent-pid={os.getpid()}"]
    with theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as child:
        ours.close()
        theirs.close()
        assert child.wait(timeout=DEADLINE.total_seconds()) == EXIT_ORPHANED


async def test_a_trainer_that_hangs_is_killed_and_told_as_dead(text: Path) -> None:
    """Its node then starts another one, as after any death."""
    async with trainer_on(text) as trainer:
        await trainer.initialise()
        await trainer.load(ranges=((0, 4000),), committed_tokens=0)
        os.kill(trainer.pid, signal.SIGSTOP)
        with pytest.raises(ChildDied, match="did not answer within 1 s: it was killed"):
            await trainer.snapshot(timeout=timedelta(seconds=1))
        assert (await asyncio.wait_for(asyncio.shield(trainer.died), 60)).returncode == -signal.SIGKILL


async def test_a_trainer_goes_on_with_the_optimiser_of_the_one_before(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "optimizer.state"
    async with trainer_on(text) as trainer:
        await trainer.initialise()
        await trainer.load(ranges=((0, 4000),), committed_tokens=0)
        with pytest.raises(InvalidTransition, match="no step"):
            await trainer.keep_optimizer(path, timeout=DEADLINE)
        await trainer.train()
        await eventually(lambda: trainer.status.steps >= 3)
        await trainer.keep_optimizer(path, timeout=DEADLINE)
    kept = path.read_bytes()
    async with trainer_on(text) as trainer:
        await trainer.initialise()
        await trainer.load(ranges=((0, 4000),), committed_tokens=0)
        await trainer.restore_optimizer(path)
        await trainer.keep_optimizer(path, timeout=DEADLINE)  # it has the state without a step of its own
        assert torch.load(path)["state"][0][0]["step"] >= 3
        path.write_bytes(kept[:-100])
        with pytest.raises(CheckpointCorrupt):
            await trainer.restore_optimizer(path)
        await trainer.train()
        await eventually(lambda: trainer.status.steps >= 2)


LARGER = SPEC.replace("dimension = 32\nlayers = 2", "dimension = 256\nlayers = 8").replace(
    "hidden_dimension = 48", "hidden_dimension = 768"
)


@pytest.mark.parametrize(
    ("name", "more"), [("adamw", ""), ("muon", 'precision = "bf16"'), ("muon", "activation_checkpointing = true")]
)
async def test_a_trainer_lives_within_the_memory_that_it_says_it_needs(text: Path, name: str, more: str) -> None:
    """Through steps, a snapshot, an apply and an evaluation; the kernel refuses every byte above."""
    toml = LARGER.replace('name = "adamw"', f'name = "{name}"\n{more}')
    spec = parse_run_spec(toml)
    needed = run_model(spec, 256).whole_model_bytes(spec.optimizer.micro_batch_samples)
    limit = int(1.02 * (needed + HOST_OVERHEAD_BYTES))  # its queues, stacks and caches vary
    config = TrainerConfig(toml, str(text), device="cpu", memory_bytes=limit)
    trainer = await Trainer.spawn(config, log_path=text.parent / "trainer.log", timeout=DEADLINE)
    try:
        assert trainer.facts.holds_all
        await trainer.initialise()
        await trainer.load(ranges=((0, 4000),), committed_tokens=0)
        await trainer.train()
        for _ in range(2):
            steps = trainer.status.steps
            await eventually(lambda steps=steps: trainer.status.steps >= steps + 2)
            await trainer.snapshot()
            await eventually(lambda steps=steps: trainer.status.steps >= steps + 4)
            await trainer.apply(ranges=((0, 4000),), committed_tokens=1)
            await trainer.evaluate()
        assert not trainer.died.done()
    finally:
        await trainer.stop(DEADLINE)


async def test_a_trainer_below_that_memory_holds_no_layers_or_says_so(text: Path) -> None:
    spec = parse_run_spec(LARGER)
    needed = run_model(spec, 256).whole_model_bytes(spec.optimizer.micro_batch_samples)
    config = TrainerConfig(LARGER, str(text), device="cpu", memory_bytes=needed + HOST_OVERHEAD_BYTES - (1 << 20))
    trainer = await Trainer.spawn(config, log_path=text.parent / "trainer.log", timeout=DEADLINE)
    try:
        assert trainer.facts.span is None  # a plan may give it some of the layers
    finally:
        await trainer.stop(DEADLINE)
