"""A node with several devices: processes that each have a part of the model, and are one trainer to everybody else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
from support.hf_runs import config_of, model_section, pretrained, spec_text

from atoll.core.errors import ChildDied, ConfigError, CorpusError
from atoll.core.run_spec import parse_run_spec
from atoll.node.data.corpus import load_corpus
from atoll.node.model.run_model import run_model
from atoll.node.trainer.trainer import Trainer, TrainerConfig
from atoll.node.training.loop import InnerLoop

DEADLINE = timedelta(seconds=180)
STEPS = 5
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
hidden_dimension = 50
tie_embeddings = true
[data]
path = "overridden"
sequence_length = 16
validation_samples = 7
[optimizer]
name = "adamw"
learning_rate = 0.01
accumulate = 2
[sync]
round_tokens = 1000
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("a reef is a ring of islands; " * 200)
    return path


@contextlib.asynccontextmanager
async def trainer_on(
    text: Path, devices: str, spec: str = SPEC, base: Path | None = None, step: float = 0.0
) -> AsyncIterator[Trainer]:
    where = str(base) if base else None
    config = TrainerConfig(spec, str(text), device=devices, base_path=where, minimum_step_seconds=step)
    trainer = await Trainer.spawn(config, log_path=text.parent / "trainer.log", timeout=DEADLINE)
    processes = [psutil.Process(trainer.pid), *psutil.Process(trainer.pid).children()]
    assert len(processes) == len(devices.split(","))
    try:
        yield trainer
    finally:
        await trainer.stop(DEADLINE)
        _, alive = psutil.wait_procs(processes, timeout=DEADLINE.total_seconds())
        assert not alive


async def steps_of(trainer: Trainer, count: int) -> None:
    """At least so many more."""
    until = trainer.status.steps + count
    await trainer.train()
    async with asyncio.timeout(DEADLINE.total_seconds()):
        while trainer.status.steps < until:
            await asyncio.sleep(0.01)
    await trainer.pause()


def alone(text: Path, spec: str, base: Path | None, steps: int, anchor_E: torch.Tensor) -> InnerLoop:
    """The same on one device."""
    torch.set_num_threads(1)
    parsed = parse_run_spec(spec)
    loop = InnerLoop(parsed, load_corpus(parsed, str(text)), "cpu", run=run_model(parsed, 256, base))
    loop.load(anchor_E, ranges=((0, 10_000),))
    for _ in range(steps):
        loop.step()
    return loop


def assert_alike(found: torch.Tensor, expected: torch.Tensor, family: str) -> None:
    """Muon's orthogonalisation makes a difference in the last bits of a gradient larger."""
    if family == "muon":
        assert (found - expected).norm() < 0.01 * expected.norm()
    else:
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize(
    ("family", "devices"),
    [
        ("", "cpu,cpu"),
        ("", "cpu,cpu,cpu"),
        ("muon", "cpu,cpu"),
        ("muon", "cpu,cpu,cpu"),
        ("qwen3_moe", "cpu,cpu"),
        ("lora", "cpu,cpu"),
    ],
)
async def test_several_devices_train_as_one_does(text, tmp_path, family, devices):
    """Rounds, too: what they snapshot, carry and take over. Of eight samples a step, a third device has fewer."""
    spec, base = SPEC, None
    if family == "lora":
        base = pretrained(tmp_path / "base", "llama", tie_word_embeddings=False)
        spec = spec_text(model_section(config_of("llama", tie_word_embeddings=False), base, ["q_proj", "v_proj"]))
    elif family == "muon":
        spec = SPEC.replace('"adamw"', '"muon"')
    elif family:
        spec = spec_text(model_section(config_of(family)))
    async with trainer_on(text, devices, spec, base, step=0.5) as trainer:
        await trainer.initialise()
        genesis_E = trainer.anchor.clone()
        await trainer.load(ranges=((0, 10_000),), committed_tokens=0)
        first = (await trainer.evaluate()).value
        await steps_of(trainer, STEPS)  # not many more, even where this process stops for a moment: errors grow
        middle = trainer.facts.layer_offsets[2]
        taken = await trainer.snapshot(0, middle)
        loop = alone(text, spec, base, taken.steps, genesis_E)
        expected = genesis_E - loop.weights_E
        assert_alike(trainer.pseudo_gradient[:middle], expected[:middle], family)
        assert not trainer.pseudo_gradient[middle:].any()
        # a round of the first layers, in which others moved them twice as far
        trainer.anchor[:middle].sub_(2 * trainer.pseudo_gradient[:middle])
        committed_E = trainer.anchor.clone()
        await trainer.apply(ranges=((taken.samples, 10_000),), committed_tokens=taken.tokens, moved=(0, middle))
        rest = await trainer.snapshot()
        assert rest.steps == 0
        torch.testing.assert_close(trainer.pseudo_gradient[:middle], torch.zeros(middle), atol=1e-6, rtol=0)
        assert_alike(trainer.pseudo_gradient[middle:], expected[middle:], family)
        assert abs((await trainer.evaluate()).value - loop.evaluate(committed_E)) < 1e-4
        assert await trainer.generate("a reef", 8) == loop.generate(committed_E, b"a reef", 8)
        await trainer.discard()
        trainer.anchor.copy_(genesis_E)
        await trainer.rebase(ranges=((0, 10_000),), committed_tokens=0)
        await steps_of(trainer, STEPS)
        last = await trainer.snapshot()
        trainer.anchor.sub_(trainer.pseudo_gradient)
        assert (await trainer.evaluate()).value < first
        assert last.steps >= STEPS
        loop.close()


async def test_when_one_device_is_lost_the_trainer_is(text):
    async with trainer_on(text, "cpu,cpu", step=0.02) as trainer:
        await trainer.initialise()
        await trainer.load(ranges=((0, 10_000),), committed_tokens=0)
        await trainer.train()
        (follower,) = psutil.Process(trainer.pid).children()
        os.kill(follower.pid, signal.SIGKILL)
        died = await asyncio.wait_for(trainer.died, DEADLINE.total_seconds())
        assert '"device_lost"' in died.last_line  # also when the collective operation of rank 0 failed first
        with pytest.raises(ChildDied):
            await trainer.evaluate()


async def test_when_the_trainer_is_killed_all_its_processes_are(text):
    async with trainer_on(text, "cpu,cpu,cpu") as trainer:
        followers = psutil.Process(trainer.pid).children()
        os.kill(trainer.pid, signal.SIGKILL)
        await asyncio.wait_for(trainer.died, DEADLINE.total_seconds())
        _, alive = psutil.wait_procs(followers, timeout=DEADLINE.total_seconds())
        assert not alive


async def test_what_is_refused_is_refused_by_all_and_training_goes_on(text):
    async with trainer_on(text, "cpu,cpu") as trainer:
        with pytest.raises(Exception, match="before an anchor was loaded"):
            await trainer.snapshot()
        await trainer.initialise()
        await trainer.load(ranges=((0, 10_000),), committed_tokens=0)
        await steps_of(trainer, 1)
        assert (await trainer.snapshot()).steps >= 1


@pytest.mark.parametrize(
    ("devices", "spec", "error"),
    [
        ("cpu,cuda:7", SPEC, ConfigError),
        ("cpu,cpu", SPEC.replace('"overridden"', '"/nowhere"'), CorpusError),
        ("cpu,cpu", SPEC.replace('"overridden"', '"/proc/self/smaps"'), CorpusError),  # each process reads another text
    ],
)
async def test_what_several_devices_cannot_do_is_said_at_once(text, devices, spec, error):
    config = TrainerConfig(spec, str(text) if "overridden" in spec else None, device=devices)
    before = set(psutil.Process().children())  # tests beside this one in a worker leave multiprocessing's tracker
    with pytest.raises(error):
        await Trainer.spawn(config, log_path=text.parent / "trainer.log", timeout=DEADLINE)
    assert set(psutil.Process().children()) <= before


async def test_they_meet_on_the_loopback_interface_whatever_the_environment_says(text, monkeypatch):
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "eth0")
    async with trainer_on(text, "cpu,cpu") as trainer:
        processes = [psutil.Process(trainer.pid), *psutil.Process(trainer.pid).children()]
        ports = [it for process in processes for it in process.net_connections() if it.status == psutil.CONN_LISTEN]
        assert ports
        assert {it.laddr.ip for it in ports} == {"127.0.0.1"}


async def test_an_owners_limit_is_that_of_all_together(text):
    limit, given = 4 * 10**9, {}
    for devices in ("cpu", "cpu,cpu"):
        config = TrainerConfig(SPEC, str(text), device=devices, memory_bytes=limit)
        trainer = await Trainer.spawn(config, log_path=text.parent / "trainer.log", timeout=DEADLINE)
        try:
            given[devices], _ = psutil.Process(trainer.pid).rlimit(psutil.RLIMIT_DATA)
        finally:
            await trainer.stop(DEADLINE)
    assert given["cpu"] - given["cpu,cpu"] == pytest.approx(limit / 2, rel=0.2)


async def test_an_orderly_end_is_no_loss_of_a_device(text):
    async with trainer_on(text, "cpu,cpu"):
        pass
    assert "device_lost" not in (text.parent / "trainer.log").read_text()


async def test_after_genesis_is_written_anew_nobody_snapshots_before_it_is_loaded(text):
    async with trainer_on(text, "cpu,cpu") as trainer:
        await trainer.initialise()
        await trainer.load(ranges=((0, 10_000),), committed_tokens=0)
        await steps_of(trainer, 2)
        await trainer.initialise()
        trainer.pseudo_gradient.zero_()
        with pytest.raises(Exception, match="before an anchor was loaded"):
            await trainer.snapshot()
        assert not trainer.pseudo_gradient.any()
        await trainer.load(ranges=((0, 10_000),), committed_tokens=0)
        await steps_of(trainer, 1)
