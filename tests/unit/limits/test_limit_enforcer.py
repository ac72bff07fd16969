"""Limits in a daemon: when the session is paused, with which reason, and what a restart remembers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from atoll.core.clock import ManualClock
from atoll.core.errors import ConfigError, DataDirUnusable, InvalidTransition, ModelTooLarge
from atoll.node.config import NodeConfig, load
from atoll.node.limits import enforcer
from atoll.node.limits.enforcer import LimitEnforcer, LimitTargets

MORNING = datetime(2026, 11, 21, 8, 0).timestamp()
GB = 10**9


class Host:
    """A limiter that counts the bytes of the test."""

    def __init__(self) -> None:
        self.bytes_total = 0
        self.rates = (0.0, 0.0)
        self.allowed = 0.0  # in this process, both ways

    def limit(self, upload_bytes_per_second: float, download_bytes_per_second: float) -> None:
        self.rates = (upload_bytes_per_second, download_bytes_per_second)

    def set_remaining_bytes(self, more_bytes: float) -> None:
        self.allowed = self.bytes_total + more_bytes


class Session:
    """A session that records the reason of its pause."""

    def __init__(self) -> None:
        self.pause_reason, self.pause_why = "", 0
        self.limits: list[NodeConfig] = []
        self.changed = asyncio.Event()

    def pause(self, reason: str, why: int) -> None:
        self.pause_reason, self.pause_why = reason, why
        self.changed.set()

    def resume(self) -> None:
        self.pause_reason = ""
        self.changed.set()

    async def limit(self, config: NodeConfig) -> None:
        if config.vram_fraction < 0.5:
            raise ModelTooLarge("the model is too large")
        self.limits.append(config)


class Node:
    """The limits of one daemon over several starts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = ManualClock(MORNING)
        self.environment: dict[str, str] = {}

    async def start(self, seed: bool = False) -> None:
        self.host, self.session = Host(), Session()
        loaded = load({"data_dir": self.directory}, self.environment | {"HOME": str(self.directory)}, None)
        self.limit_enforcer = LimitEnforcer(loaded, self.clock)
        session = None if seed else self.session
        await self.limit_enforcer.attach(LimitTargets(self.host, session, self.session.limit, lambda: None))

    async def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        handler: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]] = self.limit_enforcer.commands()[command]
        return await handler({"command": command, **arguments})

    @property
    def pause_reason(self) -> str:
        return self.session.pause_reason


@pytest.fixture
async def node(tmp_path: Path) -> Node:
    it = Node(tmp_path)
    await it.start()
    return it


async def test_a_pause_survives_a_restart_until_its_end(node: Node) -> None:
    answer = await node.ask("pause", seconds=7200)
    assert answer["until_unix"] == MORNING + 7200
    assert node.pause_reason == "paused by its owner until 2026-11-21 10:00"
    node.clock.advance(3600)
    await node.start()
    assert "until 2026-11-21 10:00" in node.pause_reason
    node.clock.advance(3601)
    await node.start()
    assert not node.pause_reason
    await node.ask("pause")
    node.clock.advance(10**6)
    await node.start()
    assert node.pause_reason == "paused by its owner"
    assert await node.ask("resume") == {"paused": False, "reason": "", "warning": ""}
    await node.start()
    assert not node.pause_reason


async def test_a_pause_ends_by_itself_without_a_restart(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await node.ask("pause", seconds=60)
    running = asyncio.create_task(node.limit_enforcer.run())
    node.clock.advance(59.99)
    await node.ask("pause", seconds=0.01)
    async with asyncio.timeout(60):
        while node.pause_reason:
            node.session.changed.clear()
            node.clock.advance(0.01)
            await node.session.changed.wait()
    running.cancel()


async def test_finish_does_not_pause_now_but_after_a_restart_until_resume(node: Node) -> None:
    await node.ask("pause", seconds=60)
    await node.ask("resume")
    assert node.limit_enforcer.finish() == ""
    assert not node.pause_reason  # or the round would be given up
    await node.ask("set", limits={"cpu_threads": 1})  # looks again
    assert not node.pause_reason
    await node.start()
    assert "finished by its owner" in node.pause_reason
    await node.ask("resume")
    await node.start()
    assert not node.pause_reason


async def test_a_pause_that_ends_meanwhile_does_not_undo_finish(node: Node) -> None:
    await node.ask("pause", seconds=60)
    node.limit_enforcer.finish()
    node.clock.advance(61)
    await node.ask("set", limits={"cpu_threads": 1})
    await node.start()
    assert "finished by its owner" in node.pause_reason


async def test_hours_pause_the_node_and_force_overrules_them_until_they_allow_training(node: Node) -> None:
    await node.ask("set", limits={"hours": "22:00-07:00"})
    assert "22:00" in node.pause_reason
    answer = await node.ask("resume")
    assert (answer["paused"], answer["reason"]) == (True, node.pause_reason)
    assert (await node.ask("resume", force=True))["paused"] is False
    assert not node.pause_reason
    await node.ask("pause")
    assert node.pause_reason == "paused by its owner"
    await node.ask("resume", force=True)
    assert not node.pause_reason
    node.clock.advance(15 * 3600)  # 23:00: now they allow it
    await node.ask("set", limits={"on_battery": "train"})
    node.clock.advance(9 * 3600)  # 08:00 again: the force is spent
    await node.ask("set", limits={"on_battery": "pause"})
    assert "22:00" in node.pause_reason


async def test_force_overrules_only_the_limit_that_paused_the_node(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    on_battery = False
    monkeypatch.setattr("atoll.node.limits.enforcer.on_battery", lambda: on_battery)
    await node.ask("set", limits={"hours": "22:00-07:00", "on_battery": "pause"})
    await node.ask("resume", force=True)
    assert not node.pause_reason
    on_battery = True
    await node.ask("set", limits={"cpu_threads": 1})  # looks again
    assert node.pause_reason == "on battery"
    assert (await node.ask("resume", force=True))["paused"] is False  # both, now
    assert not node.pause_reason
    on_battery = False
    await node.ask("set", limits={"cpu_threads": 2})
    assert not node.pause_reason
    on_battery = True
    await node.ask("set", limits={"cpu_threads": 1})
    assert node.pause_reason == "on battery"  # it allowed it meanwhile
    await node.ask("resume", force=True)
    on_battery = False
    await node.ask("resume", force=True)  # twice is no less
    assert not node.pause_reason
    answer = await node.ask("resume")  # without force all limits hold again
    assert "22:00" in answer["reason"]


async def test_force_also_overrules_the_settle_time_of_mains_power(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    on_battery = True
    monkeypatch.setattr("atoll.node.limits.enforcer.on_battery", lambda: on_battery)
    await node.ask("set", limits={"on_battery": "pause"})
    assert node.pause_reason == "on battery"
    on_battery = False
    await node.limit_enforcer.observe_and_enforce()
    assert "mains power is back" in node.pause_reason
    assert (await node.ask("resume", force=True))["paused"] is False
    assert not node.pause_reason
    await node.limit_enforcer.observe_and_enforce()
    assert not node.pause_reason
    node.clock.advance(61)
    await node.limit_enforcer.observe_and_enforce()
    on_battery = True
    await node.limit_enforcer.observe_and_enforce()
    assert node.pause_reason == "on battery"


async def test_the_owners_pause_is_reported_before_a_limit(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enforcer, "on_battery", lambda: True)
    await node.start()
    assert node.pause_reason == "on battery"
    await node.ask("pause")
    assert node.pause_reason == "paused by its owner"
    await node.ask("set", limits={"on_battery": "train"})
    await node.ask("resume")
    assert not node.pause_reason


async def test_a_used_up_month_pauses_the_node_until_the_next_month_or_a_higher_limit(node: Node) -> None:
    await node.ask("set", limits={"monthly_gigabytes": 1})
    node.host.bytes_total = 600 * 10**6
    await node.limit_enforcer.close()
    await node.start()  # counts from nothing again; the file has the rest
    assert not node.pause_reason
    node.host.bytes_total = 500 * 10**6
    await node.ask("set", limits={"cpu_threads": 1})
    assert "1 GB are used up; training resumes on 2026-12-01" in node.pause_reason
    assert node.limit_enforcer.status_json(())["month_bytes"] == 1_100_000_000
    await node.ask("set", limits={"monthly_gigabytes": "1.5"})
    assert not node.pause_reason
    await node.ask("set", limits={"monthly_gigabytes": 1})
    node.clock.advance(10 * 86400)
    await node.ask("set", limits={"cpu_threads": 2})
    assert not node.pause_reason
    assert node.limit_enforcer.status_json(())["month_bytes"] == 0


async def test_traffic_is_limited_to_the_rest_of_the_month_unless_forced(node: Node) -> None:
    assert node.host.allowed == float("inf")
    await node.ask("set", limits={"monthly_gigabytes": 1, "hours": "22:00-07:00"})
    node.host.bytes_total = 600 * 10**6
    await node.ask("resume", force=True)  # of its hours
    assert not node.pause_reason
    assert node.host.allowed == GB
    await node.limit_enforcer.close()
    await node.start()
    assert node.host.allowed == 400 * 10**6
    await node.ask("resume", force=True)
    node.host.bytes_total = 500 * 10**6
    await node.ask("set", limits={"cpu_threads": 1})
    assert "GB are used up" in node.pause_reason  # the earlier force does not overrule this
    assert node.host.allowed <= node.host.bytes_total
    await node.ask("resume", force=True)
    assert not node.pause_reason
    assert node.host.allowed == float("inf")


async def test_a_start_with_a_wrong_clock_erases_no_traffic(node: Node) -> None:
    await node.ask("set", limits={"monthly_gigabytes": 1})
    node.host.bytes_total = 2 * GB
    await node.limit_enforcer.close()
    for year in range(1970, 2000):  # a battery on the board that died, again and again
        node.clock = ManualClock(datetime(year, 1, 1).timestamp())
        await node.start()
        assert not node.pause_reason
        await node.limit_enforcer.close()
        node.clock = ManualClock(MORNING)
        await node.start()
        assert "GB are used up" in node.pause_reason
        await node.limit_enforcer.close()
    assert len(json.loads((node.directory / "traffic.json").read_bytes())["bytes_by_month"]) < 30


async def test_set_changes_all_limits_or_none(node: Node, tmp_path: Path) -> None:
    answer = await node.ask("set", limits={"upload_mbit_per_second": "8", "cpu_threads": "2"})
    assert node.host.rates == (1e6, 0.0)
    assert node.session.limits[-1].cpu_threads == 2
    assert answer["limits"]["cpu_threads"] == {"value": 2, "origin": "atoll set"}
    assert answer["limits"]["hours"] == {"value": "", "origin": "default"}
    before = (tmp_path / "node.toml").read_text()
    with pytest.raises(ConfigError, match="cpu_threads"):
        await node.ask("set", limits={"upload_mbit_per_second": "1", "cpu_threads": "many"})
    with pytest.raises(ModelTooLarge):
        await node.ask("set", limits={"upload_mbit_per_second": "1", "vram_fraction": "0.1"})
    assert node.host.rates == (1e6, 0.0)
    assert (tmp_path / "node.toml").read_text() == before
    await node.start()
    assert node.host.rates == (1e6, 0.0)


async def test_a_failed_write_refuses_set_and_warns_on_pause(node: Node, tmp_path: Path) -> None:
    node.limit_enforcer = LimitEnforcer(
        load({"data_dir": tmp_path / "gone"}, {"HOME": str(tmp_path)}, None), node.clock
    )
    await node.limit_enforcer.attach(LimitTargets(node.host, node.session, node.session.limit, lambda: None))
    with pytest.raises(DataDirUnusable):
        await node.ask("set", limits={"upload_mbit_per_second": "8", "cpu_threads": 3})
    assert node.host.rates == (0.0, 0.0)
    assert node.session.limits[-1].cpu_threads == 0  # put back
    assert "a restart will not know" in (await node.ask("pause"))["warning"]
    assert node.pause_reason  # all the same


async def test_set_warns_if_the_environment_overrides_the_limit_at_the_next_start(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_CPU_THREADS", "7")
    answer = await node.ask("set", limits={"cpu_threads": 2})
    assert answer["warnings"] == ["the next start takes ATOLL_CPU_THREADS from the environment instead"]


async def test_a_seed_has_rate_limits_but_cannot_be_paused(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.start(seed=True)
    await node.ask("set", limits={"download_mbit_per_second": 80})
    assert node.host.rates == (0.0, 1e7)
    with pytest.raises(InvalidTransition):
        await node.ask("pause")


@pytest.mark.parametrize("damage", [b"", b"{", b'{"paused": true}', b"[]"])
async def test_a_damaged_intent_pauses_and_damaged_traffic_counts_from_0(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "owner.json").write_bytes(damage)
    (tmp_path / "traffic.json").write_bytes(damage)
    node = Node(tmp_path)
    await node.start()
    assert node.pause_reason
    assert node.limit_enforcer.status_json(())["month_bytes"] == 0
    await node.ask("resume")
    assert json.loads((tmp_path / "owner.json").read_bytes())["paused"] is False
