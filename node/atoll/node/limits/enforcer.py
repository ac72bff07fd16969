"""Enforcement of the owner's limits in a running daemon.

Every few seconds `LimitEnforcer` observes the machine, asks `training_policy.decide`, and pauses or resumes the
training session. It also counts the month's traffic, limits the rates to and from peers, and sets the GPU's power cap.

`atoll pause` takes precedence over the limits. `atoll resume --force` overrules the limit that pauses the node, until
that limit allows training again. The owner's intent is written to disk before the command is answered, so that a
restart does the same. `atoll set` applies all of its changes or none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, InvalidTransition, UsageError
from atoll.node.config import LoadedConfig, NodeConfig, limits_of, save_overrides, with_limits
from atoll.node.control.local_api import Command
from atoll.node.limits.machine_usage import MachineUsage, on_battery
from atoll.node.limits.owner_files import OwnerIntent, load_owner_intent, save_owner_intent
from atoll.node.limits.power_cap import PowerCap, PowerCapRefused
from atoll.node.limits.traffic_limit import TrafficLimit, TrafficLimiter, local_time
from atoll.node.system.training_policy import MachineObservation, PauseCause, TrainingDecision, active_causes, decide
from atoll.v1 import membership_pb2 as mb

if TYPE_CHECKING:  # a seed has limits but no torch
    from atoll.node.trainer.trainer import TrainerFacts

OBSERVE_INTERVAL = timedelta(seconds=5)

_REASONS = {
    PauseCause.MONTH: mb.NODE_REASON_TRAFFIC_USED_UP,
    PauseCause.HOURS: mb.NODE_REASON_OUTSIDE_HOURS,
    PauseCause.BATTERY: mb.NODE_REASON_ON_BATTERY,
    PauseCause.IN_USE: mb.NODE_REASON_IN_USE,
}

_log = log.get("limits")


class Pausable(Protocol):
    """A training session that can be paused."""

    def pause(self, reason: str, why: mb.NodeReason) -> None: ...
    def resume(self) -> None: ...


@dataclass(frozen=True)
class LimitTargets:
    """Objects to which the limits are applied; a seed has no session."""

    traffic: TrafficLimiter
    session: Pausable | None
    limit_training: Callable[[NodeConfig], Awaitable[None]]  # raises `ModelTooLarge` if the model exceeds them
    facts: Callable[[], TrainerFacts | None]


def not_training() -> InvalidTransition:
    """Return the error for a command that only a training node can execute."""
    return InvalidTransition(
        "this member does not train: it is a seed, or it is still starting",
        "if it is a node, try again in a few seconds",
    )


class LimitEnforcer:
    """Applies one node's limits and its owner's last pause, resume or finish.

    It has many methods: the steps of one observation of the machine, and the handlers of the local API.
    """

    def __init__(self, loaded: LoadedConfig, clock: Clock) -> None:
        self.intent: OwnerIntent = load_owner_intent(loaded.config.data_dir)
        self.decision = TrainingDecision()
        self._loaded = loaded
        self._clock = clock
        self._targets: LimitTargets | None = None
        self._overruled_causes: frozenset[PauseCause] = frozenset()  # limits overruled by `resume --force`
        self._finishing = False  # the saved intent, for the next start, differs from `intent`
        self._changed = asyncio.Event()
        self._change_lock = asyncio.Lock()
        self._machine_usage = MachineUsage(clock.monotonic())
        self._traffic = TrafficLimit(loaded.config.data_dir, clock)
        self._power = PowerCap(loaded.config.data_dir)
        self._requested_power_cap: tuple[float, tuple[str, ...]] | None = None
        self._warnings: dict[str, str] = {}

    @property
    def loaded(self) -> LoadedConfig:
        """The configuration with the current limits, and the origin of each value."""
        return self._loaded

    @property
    def config(self) -> NodeConfig:
        """The configuration with the current limits."""
        return self._loaded.config

    async def attach(self, targets: LimitTargets) -> None:
        """Begin to enforce the limits; the first decision is applied when this returns."""
        self._targets = targets
        await asyncio.to_thread(self._power.restore)  # a daemon that was killed may have left its power cap
        self._traffic.limit_rates(targets.traffic, self.config)
        await self.observe_and_enforce()

    async def run(self) -> None:
        """Observe and enforce until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds_to_next_look()):
                    await self._changed.wait()
            self._changed.clear()
            await self.observe_and_enforce()

    async def close(self) -> None:
        """Save the month's traffic and restore the power cap."""
        if self._targets is not None:
            self._traffic.count(self._targets.traffic)
            self._warn("traffic", self._traffic.save())
            await asyncio.to_thread(self._power.restore)

    def finish(self) -> str:
        """Save that a restarted node stays paused until `atoll resume`; return a warning for people, or "".

        The running process is not paused, because it needs the current round in order to leave.
        """
        self._finishing = True
        self._save_intent(OwnerIntent(paused=True, finished=True))
        return self._warnings.get("intent", "")

    def status_json(self, problems: Sequence[str]) -> dict[str, Any]:
        """Traffic and warnings for `atoll status`; `problems` become further warnings."""
        return {
            "month_bytes": self._traffic.month_bytes,
            "month_bytes_allowed": int(self.config.policy.monthly_bytes),
            "warnings": [*self._warnings.values(), *problems],
        }

    def commands(self) -> dict[str, Command]:
        """Handlers of the local API, by command."""
        return {"pause": self._pause, "resume": self._resume, "set": self._set}

    # --- observing -------------------------------------------------------------------------------------

    async def observe_and_enforce(self) -> None:
        """Count traffic, observe the machine, decide, and pause or resume the session. Call `attach` first."""
        targets = self._targets
        assert targets is not None
        self._traffic.count(targets.traffic)
        if self._warnings.get("traffic") or self._traffic.save_is_due():
            self._warn("traffic", self._traffic.save())
        if self.intent.paused and not self.intent.is_paused_at(self._clock.unix()):
            self._end_expired_pause()
        await self._apply_power_cap(targets)
        before, seen = self.decision, await self._observe()
        # also while the settle time after the return of mains power runs
        paused_by = {before.cause} if not before.train else set()
        # a limit that allows training again is no longer overruled
        self._overruled_causes &= active_causes(self.config.policy, seen) | paused_by
        self.decision = decide(self.config.policy, seen, before, self._overruled_causes)
        if self.decision.cause is not before.cause:
            _log.info("training_decision", train=self.decision.train, reason=self.decision.reason)
        month_overruled = PauseCause.MONTH in self._overruled_causes
        self._traffic.set_remaining(targets.traffic, 0 if month_overruled else self.config.policy.monthly_bytes)
        self._apply()

    async def _observe(self) -> MachineObservation:
        policy, now = self.config.policy, self._clock.monotonic()
        unused = (
            await self._machine_usage.seconds_since_use(now, self._clock.unix())
            if policy.idle_seconds
            else float("inf")
        )
        return MachineObservation(
            local_time(self._clock), now, self._traffic.month_bytes, policy.pause_on_battery and on_battery(), unused
        )

    def _apply(self) -> None:
        """Pause or resume the session according to `reason`. Idempotent."""
        session = self._targets.session if self._targets is not None else None
        if session is None:
            return
        reason = self.reason
        if reason:
            session.pause(reason, self._why)
        else:
            session.resume()

    @property
    def reason(self) -> str:
        """Reason for the pause, for people; empty while the node may train."""
        unix = self._clock.unix()
        if self.intent.is_paused_at(unix):
            return self.intent.reason(unix)
        return "" if self.decision.train else self.decision.reason

    @property
    def _why(self) -> mb.NodeReason:
        """The typed reason for the pause."""
        if self.intent.is_paused_at(self._clock.unix()) or self.decision.cause is None:
            return mb.NODE_REASON_PAUSED_BY_OWNER
        return _REASONS[self.decision.cause]

    def _seconds_to_next_look(self) -> float:
        """Seconds to the next observation, or to the end of a pause if it is sooner."""
        left = float("inf") if self.intent.until_unix is None else self.intent.until_unix - self._clock.unix()
        return max(0.0, min(OBSERVE_INTERVAL.total_seconds(), left))

    # --- power and warnings ----------------------------------------------------------------------------

    async def _apply_power_cap(self, targets: LimitTargets) -> None:
        """Set the power cap once the device is known, and again when the limit changes."""
        facts = targets.facts()
        if facts is None:
            return
        requested = (self.config.power_watts, tuple(filter(None, facts.device_uuid.split(","))))
        if requested == self._requested_power_cap:
            return
        self._requested_power_cap = requested
        try:
            await asyncio.to_thread(self._power.apply, *requested)
        except (PowerCapRefused, AtollError) as error:
            self._warn("power", str(error))
        else:
            self._warn("power", "")
        no_memory = self.config.vram_fraction < 1 and facts.device.startswith("cpu")
        self._warn("memory", "vram_fraction has no effect: the device is a CPU" if no_memory else "")

    def _warn(self, subject: str, problem: str) -> None:
        """Show `problem` in `atoll status` until it is empty; log it when it is new."""
        if problem and self._warnings.get(subject) != problem:
            _log.warning("limit_not_enforced", reason=problem)
        self._warnings.pop(subject, None)
        if problem:
            self._warnings[subject] = problem

    # --- the local API ---------------------------------------------------------------------------------

    async def _pause(self, request: dict[str, Any]) -> dict[str, Any]:
        self._require_training()
        seconds = float(request.get("seconds") or 0)
        self._set_intent(OwnerIntent(paused=True, until_unix=self._clock.unix() + seconds if seconds > 0 else None))
        return {"paused": True, "until_unix": self.intent.until_unix, "warning": self._warnings.get("intent", "")}

    async def _resume(self, request: dict[str, Any]) -> dict[str, Any]:
        self._require_training()
        paused_by = {self.decision.cause} if self.decision.cause is not None else set()
        self._overruled_causes = self._overruled_causes | paused_by if request.get("force") else frozenset()
        self._set_intent(OwnerIntent())
        if self._targets is not None:
            await self.observe_and_enforce()  # the limit in force is now overruled, but another one may still apply
        return {"paused": bool(self.reason), "reason": self.reason, "warning": self._warnings.get("intent", "")}

    def _set_intent(self, intent: OwnerIntent) -> None:
        """Apply the intent at once, then save it: it applies even if the disk is full."""
        self.intent = intent
        self._apply()
        self._changed.set()
        self._save_intent(intent)

    def _end_expired_pause(self) -> None:
        """Clear a pause whose time is over; the caller applies the change."""
        self.intent = OwnerIntent()
        if not self._finishing:
            self._save_intent(self.intent)

    def _save_intent(self, intent: OwnerIntent) -> None:
        """Save the intent for the next start; a failure becomes a warning."""
        try:
            save_owner_intent(self.config.data_dir, intent)
        except AtollError as error:
            self._warn("intent", f"a restart will not know of this: {error}")
        else:
            self._warn("intent", "")

    async def _set(self, request: dict[str, Any]) -> dict[str, Any]:
        """Change the limits in the request, if any, and list all limits."""
        changes = request.get("limits") or {}
        if not isinstance(changes, Mapping):
            raise UsageError("limits must be an object of keys and values", "write: atoll set KEY VALUE")
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
        overridden = [
            key for key in changes if old.origin[key] == "environment" or f"ATOLL_{key.upper()}" in os.environ
        ]
        names = ", ".join(f"ATOLL_{key.upper()}" for key in overridden)
        self._warn("environment", f"the next start takes {names} from the environment instead" if overridden else "")
        self._loaded = new
        # decide again under the new limits, without the settle time of mains power
        self.decision = TrainingDecision(True, self.decision.cause)
        self._traffic.limit_rates(targets.traffic, self.config)
        self._requested_power_cap = None
        await self.observe_and_enforce()

    def _require_training(self) -> None:
        if self._targets is None or self._targets.session is None:
            raise not_training()
