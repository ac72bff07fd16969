"""Parts of `gpu_hour` with several programs on one device.

`swarm`: four daemons that share it. `mixed_swarm`: daemons with and without it in one run, whose anchors must be equal
bit for bit. `route`: two stages on it beside the whole model.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from support.memory_network import MemoryHub

from atoll.core.errors import ChildDied
from atoll.lab.demo import RUN
from atoll.lab.launcher import LocalSwarm
from atoll.node.model.span import Span
from atoll.node.pipeline.dispatcher import RouteDispatcher
from atoll.node.pipeline.route import RoutePlace
from atoll.node.trainer.trainer import TrainerConfig
from benchmarks.gpu_session import VOCABULARY, Hour, Size
from benchmarks.process_swarm import LabSwarm
from benchmarks.stage_process import StageProcess

ROUNDS_WATCHED_SECONDS = 45
MIXED_ROUNDS = 6
_READY = timedelta(seconds=180)


def swarm(hour: Hour) -> None:
    """Four daemons that share the device, beside one trainer alone."""
    size = hour.sizes(Size("125m", 1024, 8))[0]
    with hour.loop(hour.spec(size)) as (loop, _):
        alone = size.tokens / hour.seconds_of(loop.step)
    hour.say("one loop alone", tokens_per_s=alone)
    names = ("a", "b", "c", "d")
    flags = ("--device", "cpu", "--cpu-threads", "1") if hour.cpu else ("--device", "cuda:0", "--vram-fraction", "0.2")
    asyncio.run(_swarm(hour, size, dict.fromkeys(names, flags), 20_000 if hour.cpu else 1_000_000, alone))


async def _swarm(hour: Hour, size: Size, members: dict[str, tuple[str, ...]], tokens: int, alone: float) -> None:
    with tempfile.TemporaryDirectory(prefix="atoll-") as root:
        local = LocalSwarm(Path(root))
        try:
            await _started(local, hour, size, members, tokens)
            before, began = _figures(local, members), time.monotonic()
            await asyncio.sleep(15 if hour.cpu else ROUNDS_WATCHED_SECONDS)
            local.check()
            seconds, after = time.monotonic() - began, _figures(local, members)
        finally:
            await local.close()
        steps = {name: after[name]["steps"] - before[name]["steps"] for name in members}
        pace = sum(steps.values()) * size.tokens / seconds
        committed = after["a"]["round"] - before["a"]["round"]
        hour.say(
            f"{len(members)} daemons, {size}",
            tokens_per_s=pace,
            beside_one_loop=pace / alone,
            rounds=committed,
            round_s=seconds / max(1, committed),
            steps=list(steps.values()),
            restarts=sum(it["trainer_restarts"] for it in after.values()),
            abandoned=sum(it["rounds_abandoned"] for it in after.values()),
            data_stall_s=max(it["data_stall_seconds"] for it in after.values()),
            held_out=after["a"]["validation_loss"],
        )


def mixed_swarm(hour: Hour) -> None:
    """Two daemons with the device and one without: every committed round's digest was attested by all three."""
    size = Size("nano", 128, 4)
    gpu = ("--device", "cpu" if hour.cpu else "cuda:0")
    members = {"a": gpu, "b": gpu, "cpu": ("--device", "cpu", "--cpu-threads", "2")}
    asyncio.run(_mixed(hour, size, members))


async def _mixed(hour: Hour, size: Size, members: dict[str, tuple[str, ...]]) -> None:
    with tempfile.TemporaryDirectory(prefix="atoll-") as root:
        local = LocalSwarm(Path(root))
        try:
            await _started(local, hour, size, members, 4_000 if hour.cpu else 30_000, "fp32")
            first = _figures(local, members)["a"]["round"]

            def committed() -> bool:
                return min(it["round"] for it in _figures(local, members).values()) >= first + MIXED_ROUNDS

            await local.until(committed, f"no {MIXED_ROUNDS} rounds", timedelta(seconds=150))
            disks = LabSwarm(local, list(members), hour.spec(size))
            chains = [disks.chain(name) for name in members]
        finally:
            await local.close()
    held = sorted(set.intersection(*(set(chain) for chain in chains)))
    hour.say(
        "2 daemons with the device, 1 without",
        rounds=len(held),
        equal=sum(len({chain[number].head.hash for chain in chains}) == 1 for number in held),
        whole=sum(len(chains[0][number].head.present) == len(members) for number in held),
    )


async def _started(
    local: LocalSwarm,
    hour: Hour,
    size: Size,
    members: dict[str, tuple[str, ...]],
    round_tokens: int,
    precision: str = "bf16",
) -> None:
    """Start all, and wait for the first round that counts."""
    vocabulary = f"vocabulary = {VOCABULARY}\n" if size.preset != "nano" else ""
    toml = (
        f'version = 1\n[run]\nname = "{RUN}"\nmin_nodes = {len(members)}\nstop_tokens = 1000000000000\n'
        f'[model]\npreset = "{size.preset}"\n{vocabulary}'
        f'[data]\npath = "{hour.corpus}"\nsequence_length = {size.sequence_length}\nvalidation_samples = 32\n'
        f'[optimizer]\nprecision = "{precision}"\nmicro_batch_samples = {size.samples}\n'
        f'[sync]\nround_tokens = {round_tokens}\nround_growth = 1.0\ncodec = "int4"\n'
    )
    began = time.monotonic()
    await local.start_coordinator()
    await local.create_run(toml)
    await local.start_member("seed", "seed")
    await local.until(lambda: local.in_state("seed", "ready"), "the seed did not start", _READY)
    for name, flags in members.items():
        await local.start_member(name, "node", *flags)

    def trains() -> bool:
        return min(it["round"] for it in _figures(local, members).values()) >= 2

    await local.until(trains, "no second round", _READY)
    hour.say("second round", seconds=time.monotonic() - began)


def _figures(local: LocalSwarm, members: dict[str, tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    nothing: dict[str, Any] = {"round": -1, "steps": 0}
    return {name: local.status(name) or nothing for name in members}


def route(hour: Hour) -> None:
    """Two stages, each a trainer process on the device, beside the whole model in one."""
    size = hour.sizes(Size("125m", 1024, 8))[0]
    with hour.loop(hour.spec(size, name="adamw")) as (loop, _):
        alone = size.tokens / hour.seconds_of(loop.step)
        last = loop.run.architecture.layers - 1
    spans = (Span(0, last // 2), Span(last // 2 + 1, last))
    asyncio.run(_route(hour, size, spans, alone))


async def _route(hour: Hour, size: Size, spans: Sequence[Span], alone: float) -> None:
    micro_batches, flushes = 8, 2 if hour.cpu else 20
    spec = hour.spec(size, name="adamw")
    routed = spec.pipeline.model_copy(update={"micro_batches": micro_batches})
    toml = spec.model_copy(update={"pipeline": routed}).resolved_toml()
    hub, peers = MemoryHub(), tuple(f"stage-{stage}" for stage in range(len(spans)))
    async with AsyncExitStack() as undo:
        directory = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="atoll-")))
        stages = []
        for stage, span in enumerate(spans):
            config = TrainerConfig(
                toml, str(hour.corpus), device=str(hour.device), vram_fraction=0.45, span=(span.first, span.last)
            )
            place = RoutePlace(1, 0, peers, stage)
            dispatcher = RouteDispatcher(hub.join(peers[stage]))
            stages.append(await StageProcess.start(dispatcher, place, config, directory / f"{stage}.log"))
            undo.push_async_callback(stages[-1].stop)
        began = await _stepped(stages[-1], 3)
        seconds = await _stepped(stages[-1], flushes) - began
    pace = flushes * micro_batches * size.tokens / seconds
    hour.say(f"2 stages, {size}", tokens_per_s=pace, whole_model_tokens_per_s=alone, beside_whole=pace / alone)


async def _stepped(stage: StageProcess, flushes: int) -> float:
    """Wait for so many more flushes; returns the time."""
    enough = stage.trainer.status.steps + flushes
    async with asyncio.timeout(120):
        while stage.trainer.status.steps < enough:
            if stage.trainer.died.done():
                raise ChildDied(str(stage.trainer.died.result()))
            await asyncio.sleep(0.01)
    return time.monotonic()
