"""The owner's limits at work in a running daemon: look, decide, pause or resume, count, remember.

Every few seconds the machine is observed and `policy.decide` asked; the owner's own `pause` stands above it, and
`resume --force` overrules one objection until it changes. What the owner says is written down before it is answered,
so that a restart does the same. `atoll set` takes effect as a whole or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, InvalidTransition, UsageError
from atoll.node.config import LoadedConfig, NodeConfig, limits_of, save_overrides, with_limits
from atoll.node.control.local_api import Command
from atoll.node.limits.machine_usage import MachineUsage, on_battery
from atoll.node.limits.owner_files import MonthlyTraffic, OwnerIntent, load_owner_intent, save_owner_intent
from atoll.node.limits.power_cap import PowerCap, PowerCapRefused
from atoll.node.trainer.trainer import TrainerFacts
from atoll.node.training_policy import MachineObservation, PauseCause, TrainingDecision, active_causes, decide

OBSERVE_INTERVAL = timedelta(seconds=5)
TRAFFIC_SAVE_INTERVAL = timedelta(seconds=60)  # a crash forgets so much traffic at most
_BYTES_PER_MBIT = 1e6 / 8

_log = log.get("limits")


class Pausable(Protocol):
    """What can be told to rest."""

    def pause(self, reason: str) -> None: ...
    def resume(self) -> None: ...


class TrafficLimiter(Protocol):
    """What counts and slows the bytes to and from peers."""

    @property
    def bytes_total(self) -> int: ...
    def limit(self, upload_bytes_per_second: float, download_bytes_per_second: float) -> None: ...
    def set_remaining_bytes(self, more_bytes: float) -> None: ...


@dataclass(frozen=True)
class LimitTargets:
    """What the limits hold for; a seed has no session."""

    traffic: TrafficLimiter
    session: Pausable | None
    limit_training: Callable[[NodeConfig], Awaitable[None]]  # raises `ModelTooLarge` when they cannot hold
    facts: Callable[[], TrainerFacts | None]


class LimitEnforcer:
    """The limits of one node and its owner's standing wish."""

    def __init__(self, loaded: LoadedConfig, clock: Clock) -> None:
        self.intent: OwnerIntent = load_owner_intent(loaded.config.data_dir)
        self.verdict = TrainingDecision()
        self.month_bytes = 0
        self._loaded = loaded
        self._clock = clock
        self._targets: LimitTargets | None = None
        self._overruled_causes: frozenset[PauseCause] = frozenset()  # limits that the owner overruled
        self._finishing = False  # what is written down is for the next start
        self._changed = asyncio.Event()
        self._change_lock = asyncio.Lock()
        self._machine_usage = MachineUsage(clock.monotonic())
        self._month = MonthlyTraffic(loaded.config.data_dir)
        self._saved_at_monotonic = clock.monotonic()
        self._power = PowerCap(loaded.config.data_dir)
        self._requested_power_cap: tuple[float, tuple[str, ...]] | None = None
        self._warnings: dict[str, str] = {}

    @property
    def config(self) -> NodeConfig:
        """As it stands now."""
        return self._loaded.config

    async def attach(self, targets: LimitTargets) -> None:
        """From here on the limits hold; the first verdict is in force when this returns."""
        self._targets = targets
        await asyncio.to_thread(self._power.restore)  # of a daemon that was killed
        self._limit_rates()
        await self._observe_and_enforce()

    async def run(self) -> None:
        """Look again and again."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds_to_next_look()):
                    await self._changed.wait()
            self._changed.clear()
            await self._observe_and_enforce()

    async def close(self) -> None:
        """Write the month's traffic, put the power cap back."""
        if self._targets is not None:
            self._count_traffic(self._targets.traffic)
            self._save_month()
            await asyncio.to_thread(self._power.restore)

    def finish(self) -> str:
        """The owner wants no more after this round: a restart rests until told otherwise.

        Not in force here, because whoever rests gets no round to leave with. Returns a warning for people, or nothing.
        """
        self._finishing = True
        self._save_intent(OwnerIntent(paused=True, finished=True))
        return self._warnings.get("wish", "")

    def describe(self, problem: str) -> dict[str, Any]:
        """For `atoll status`; `problem` is one more that its owner should know of."""
        return {
            "month_bytes": self.month_bytes,
            "month_bytes_allowed": int(self.config.policy.monthly_bytes),
            "warnings": [*self._warnings.values(), *([problem] if problem else [])],
        }

    def commands(self) -> dict[str, Command]:
        """For the local API."""
        return {"pause": self._pause, "resume": self._resume, "set": self._set}

    # --- looking ---------------------------------------------------------------------------------------

    async def _observe_and_enforce(self) -> None:
        targets = self._targets
        assert targets is not None
        self._count_traffic(targets.traffic)
        if (
            self._warnings.get("traffic")
            or self._clock.monotonic() - self._saved_at_monotonic >= TRAFFIC_SAVE_INTERVAL.total_seconds()
        ):
            self._save_month()
        if self.intent.paused and not self.intent.is_paused_at(self._clock.unix()):
            self._end_expired_pause()
        await self._apply_power_cap(targets)
        before, seen = self.verdict, await self._observe()
        told = {before.cause} if not before.train else set()  # also while mains power has to last
        self._overruled_causes &= (
            active_causes(self.config.policy, seen) | told
        )  # who allows it again is asked anew the next time
        self.verdict = decide(self.config.policy, seen, before, self._overruled_causes)
        if self.verdict.cause is not before.cause:
            _log.info("limits", train=self.verdict.train, reason=self.verdict.reason or "none holds")
        self._set_remaining_traffic(targets.traffic)
        self._apply()

    async def _observe(self) -> MachineObservation:
        policy, now = self.config.policy, self._clock.monotonic()
        unused = (
            await self._machine_usage.seconds_since_use(now, self._clock.unix())
            if policy.idle_seconds
            else float("inf")
        )
        return MachineObservation(
            self._local_time(), now, self.month_bytes, policy.pause_on_battery and on_battery(), unused
        )

    def _apply(self) -> None:
        """Tell the session what holds now; saying it twice is fine."""
        session = self._targets.session if self._targets is not None else None
        if session is None:
            return
        reason = self.reason
        if reason:
            session.pause(reason)
        else:
            session.resume()

    @property
    def reason(self) -> str:
        """Why the node does not train, for people; empty when it may."""
        unix = self._clock.unix()
        if self.intent.is_paused_at(unix):
            return self.intent.reason(unix)
        if not self.verdict.train:
            return self.verdict.reason
        return ""

    def _seconds_to_next_look(self) -> float:
        """Until the next look, or the end of a pause if that is sooner."""
        left = float("inf") if self.intent.until_unix is None else self.intent.until_unix - self._clock.unix()
        return max(0.0, min(OBSERVE_INTERVAL.total_seconds(), left))

    def _local_time(self) -> datetime:
        return datetime.fromtimestamp(self._clock.unix()).astimezone()

    # --- traffic and power -----------------------------------------------------------------------------

    def _limit_rates(self) -> None:
        assert self._targets is not None
        up, down = self.config.upload_mbit_per_second, self.config.download_mbit_per_second
        self._targets.traffic.limit(up * _BYTES_PER_MBIT, down * _BYTES_PER_MBIT)

    def _count_traffic(self, traffic: TrafficLimiter) -> None:
        self.month_bytes = self._month.count(traffic.bytes_total, self._local_time())

    def _set_remaining_traffic(self, traffic: TrafficLimiter) -> None:
        """The rest of the month, so that not even one look's worth goes over it; `resume --force` lifts the limit."""
        self._count_traffic(traffic)
        allowed = self.config.policy.monthly_bytes
        traffic.set_remaining_bytes(
            allowed - self.month_bytes if allowed and PauseCause.MONTH not in self._overruled_causes else math.inf
        )

    def _save_month(self) -> None:
        self._saved_at_monotonic = self._clock.monotonic()
        try:
            self._month.save()
        except AtollError as error:
            self._warn("traffic", f"this month's traffic is not written down: {error}")
        else:
            self._warn("traffic", "")

    async def _apply_power_cap(self, targets: LimitTargets) -> None:
        """Once the device is known, and again whenever the cap changes."""
        facts = targets.facts()
        if facts is None:
            return
        asked = (self.config.power_watts, tuple(filter(None, facts.device_uuid.split(","))))
        if asked == self._requested_power_cap:
            return
        self._requested_power_cap = asked
        try:
            await asyncio.to_thread(self._power.apply, *asked)
        except (PowerCapRefused, AtollError) as error:
            self._warn("power", str(error))
        else:
            self._warn("power", "")
        no_memory = self.config.vram_fraction < 1 and facts.device.startswith("cpu")
        self._warn("memory", "vram_fraction does nothing here: the device is a CPU" if no_memory else "")

    def _warn(self, about: str, problem: str) -> None:
        """Shown by `atoll status` until the problem is empty; logged when it is new."""
        if problem and self._warnings.get(about) != problem:
            _log.warning("a limit is not kept", reason=problem)
        self._warnings.pop(about, None)
        if problem:
            self._warnings[about] = problem

    # --- the local API ---------------------------------------------------------------------------------

    async def _pause(self, request: dict[str, Any]) -> dict[str, Any]:
        self._require_training()
        seconds = float(request.get("seconds") or 0)
        self._set_intent(OwnerIntent(paused=True, until_unix=self._clock.unix() + seconds if seconds > 0 else None))
        return {"paused": True, "until_unix": self.intent.until_unix, "warning": self._warnings.get("wish", "")}

    async def _resume(self, request: dict[str, Any]) -> dict[str, Any]:
        self._require_training()
        told = {self.verdict.cause} if self.verdict.cause is not None else set()
        self._overruled_causes = self._overruled_causes | told if request.get("force") else frozenset()
        self._set_intent(OwnerIntent())
        if self._targets is not None:
            await self._observe_and_enforce()  # with that limit overruled, another may hold
        return {"paused": bool(self.reason), "reason": self.reason, "warning": self._warnings.get("wish", "")}

    def _set_intent(self, intent: OwnerIntent) -> None:
        """In force at once, also when the disk is full."""
        self.intent = intent
        self._apply()
        self._changed.set()
        self._save_intent(intent)

    def _end_expired_pause(self) -> None:
        """The pause is over by itself; `_observe_and_enforce` goes on."""
        self.intent = OwnerIntent()
        if not self._finishing:
            self._save_intent(self.intent)

    def _save_intent(self, intent: OwnerIntent) -> None:
        """For the next start; told to people where it fails."""
        try:
            save_owner_intent(self.config.data_dir, intent)
        except AtollError as error:
            self._warn("wish", f"a restart will not know of this: {error}")
        else:
            self._warn("wish", "")

    async def _set(self, request: dict[str, Any]) -> dict[str, Any]:
        """Change limits, or only list them."""
        changes = request.get("limits") or {}
        if not isinstance(changes, Mapping):
            raise UsageError("limits are keys with values")
        async with self._change_lock:
            if changes:
                await self._change(changes)
        return {"limits": limits_of(self._loaded), "warnings": list(self._warnings.values())}

    async def _change(self, changes: Mapping[str, Any]) -> None:
        old, new = self._loaded, with_limits(self._loaded, changes)
        targets = self._targets
        if targets is None:
            raise InvalidTransition("this node is still starting", "try again in a few seconds")
        await targets.limit_training(new.config)
        try:
            await asyncio.to_thread(save_overrides, new)
        except AtollError:
            await targets.limit_training(old.config)
            raise
        overruled = [key for key in changes if old.origin[key] == "environment" or f"ATOLL_{key.upper()}" in os.environ]
        names = ", ".join(f"ATOLL_{key.upper()}" for key in overruled)
        self._warn("environment", f"{names} in the environment wins at the next start" if overruled else "")
        self._loaded = new
        self.verdict = TrainingDecision(
            True, self.verdict.cause
        )  # the new limits are judged afresh, without settling first
        self._limit_rates()
        self._requested_power_cap = None
        await self._observe_and_enforce()

    def _require_training(self) -> None:
        if self._targets is None or self._targets.session is None:
            raise InvalidTransition("this member is a seed or still starting; it does not train")
