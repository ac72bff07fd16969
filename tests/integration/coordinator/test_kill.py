"""SIGKILL of a real coordinator under load, again and again: nothing that it acknowledged is ever lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from integration.coordinator.kill_lab import KINDS, Kill, Victim

LOAD_SECONDS = 90.0  # at most, until every kind of call was seen


def chosen(victim: Victim, number: int) -> Kill:
    """Every third time after a while, else at a moment of a call: all kinds in turn, under way or just answered."""
    if number % 3 == 0:
        return Kill(seconds=victim.rng.uniform(0.0, 0.6))
    kind = KINDS[(number // 3) % len(KINDS)]
    return Kill(kind, acked=number % 3 == 1, skip=victim.rng.randrange(4), seconds=LOAD_SECONDS)


async def loaded_until_killed(victim: Victim, kill: Kill) -> None:
    async with victim.process() as process:
        home = await victim.ready()
        if victim.nodes:
            victim.kill = Kill()
            await victim.check(home)
        else:
            await victim.begin(home)
        victim.kill = kill
        load = asyncio.create_task(victim.load(home))
        waiting = asyncio.create_task(kill.now.wait())
        await asyncio.wait({load, waiting}, timeout=kill.seconds, return_when=asyncio.FIRST_COMPLETED)
        reached = kill.now.is_set() or not kill.kind
        process.kill()
        kill.now.set()
        waiting.cancel()
        result = (await asyncio.gather(load, return_exceptions=True))[0]
        # a heartbeat on a stream that has ended meanwhile is an InvalidStateError
        assert isinstance(result, grpc.aio.AioRpcError | asyncio.InvalidStateError | AssertionError), result
        if isinstance(result, AssertionError) and "ended the stream" not in str(result):
            raise result
        assert reached, f"no {kill.kind} call in {LOAD_SECONDS} s; the load ended with {result!r}"
        await victim.close()


async def killed_while_it_starts(victim: Victim) -> None:
    async with victim.process():
        await asyncio.sleep(victim.rng.uniform(0.2, 2.0))  # not to wait for anything: to kill at any moment


async def kill_often(tmp_path: Path, times: int, seed: int) -> None:
    began = time.monotonic()
    victim = Victim(tmp_path / "c", seed)
    for number in range(times):
        if number % 8 == 7:
            await killed_while_it_starts(victim)
        else:
            await loaded_until_killed(victim, chosen(victim, number))
    async with victim.process():
        await victim.check(await victim.ready())
        await victim.close()
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(victim.ledger.counts.items()))
    print(f"{times} kills in {time.monotonic() - began:.0f} s; acknowledged: {told}")


@pytest.mark.swarm
@pytest.mark.timeout(1800)
async def test_killed_under_load_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    await kill_often(tmp_path, 24, seed=3)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_killed_200_times_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    await kill_often(tmp_path, 200, seed=4)
