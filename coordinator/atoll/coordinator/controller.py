"""`Controller`, the only place where the state changes: compute a step, make it durable, then publish it.

Steps run one after the other on a thread of their own, so the event loop never waits for a disk, and no lock is needed.
Readers take `state`, which is immutable. If the store fails, the state does not change and the caller gets the error.
Plans and deny-lists are signed here. A planner search takes seconds, so it runs on another thread; its answer is
applied as a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog

from atoll.coordinator.planner.question import Answer, Question
from atoll.coordinator.rounds import node_metrics
from atoll.coordinator.runs import machine, restart
from atoll.coordinator.signed_documents import SignedDocuments
from atoll.coordinator.state.draft import Step
from atoll.coordinator.state.snapshot import Policy, State, StepTime
from atoll.coordinator.store.records import Change, DenyRow, DropRun, Event, PlanRow
from atoll.coordinator.store.store import Store
from atoll.core import log
from atoll.core.clock import Clock, unix_ms
from atoll.core.errors import AtollError
from atoll.core.identity import Identity

T = TypeVar("T")
Operation = Callable[[State, StepTime], Step[T]]
TICK_SECONDS = 0.2


class Controller:
    """State, store and operator key."""

    def __init__(self, store: Store, operator: Identity, clock: Clock, policy: Policy) -> None:
        self.store = store
        self.operator = operator
        self.clock = clock
        self.policy = policy
        self.tick_failures = 0
        self.store_failure: str = ""  # why the last write failed; empty if it succeeded
        self._log: structlog.stdlib.BoundLogger = log.get("controller")
        self._thread = ThreadPoolExecutor(1, "controller")
        self._planner = ThreadPoolExecutor(1, "planner")
        self._change_events: set[asyncio.Event] = set()
        self.signed = SignedDocuments(operator, clock)
        contents = store.load()
        plans, deny = self.signed.load(contents)
        self.state = restart.restore(contents, plans, deny, self.moment(), operator.public_key)

    async def do(self, operation: Operation[T]) -> T:
        """Run one step and return its result once it is durable. Raises the errors of the step and of the store."""
        loop = asyncio.get_running_loop()
        step = await loop.run_in_executor(self._thread, self._perform, operation, loop)
        return step.result

    async def read(self, query: Callable[[Store], T]) -> T:
        """Read from the store without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, query, self.store)

    async def run(self) -> None:
        """Tick and plan until cancelled. Failures are logged and retried; meanwhile members continue to train."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(self.tick))
            group.create_task(self._repeat(self.answer_questions))

    async def _repeat(self, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            await action()

    async def tick(self) -> None:
        """Apply changes that depend on time alone, one step per run: a failure in one does not delay the others."""
        await self._do_and_log(lambda state, now: machine.tick_streams(state, now, self.policy))
        await self._do_and_log(node_metrics.store)
        for run_id in self.state.runs:
            await self._do_and_log(lambda state, now, run_id=run_id: machine.tick_run(state, now, self.policy, run_id))  # type: ignore[misc]

    async def answer_questions(self) -> None:
        """Send the open questions of all runs to the planner, one after the other, and apply its answers."""
        for run_id, memory in self.state.memory.items():
            if memory.question is not None:
                await self._attempt_answer(run_id, memory.question)

    async def plan(self, question: Question) -> Answer:
        """Compute the planner's answer on the planner's thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._planner, _solve_question, question, self.clock)

    @contextmanager
    def change_event(self) -> Iterator[asyncio.Event]:
        """Yield an event that is set after every durable change."""
        changed = asyncio.Event()
        self._change_events.add(changed)
        try:
            yield changed
        finally:
            self._change_events.discard(changed)

    def moment(self) -> StepTime:
        """The current time."""
        return StepTime(unix_ms(self.clock), self.clock.monotonic())

    def close(self) -> None:
        """Finish the running step, then close the store. The result of a running planner search is dropped."""
        self._planner.shutdown(wait=False, cancel_futures=True)
        self._thread.shutdown(wait=True)
        self.store.close()

    def notify(self) -> None:
        """Wake all watchers of `change_event`."""
        for watcher in self._change_events:
            watcher.set()

    async def _do_and_log(self, operation: Operation[Any]) -> None:
        try:
            await self.do(operation)
        except Exception as error:  # supervision: the coordinator must survive a full disk
            self.tick_failures += 1
            self._log.error("tick failed", error=str(error), error_type=type(error).__name__)

    async def _attempt_answer(self, run_id: str, question: Question) -> None:
        try:
            found = await self.plan(question)
        except Exception as error:  # supervision: a planner bug must not end the coordinator
            self.tick_failures += 1
            self._log.error("planning failed", run=run_id, error=str(error), error_type=type(error).__name__)
            found = Answer(missing="the planner failed on this problem; see the coordinator's log")
        await self._do_and_log(lambda state, now: machine.apply_planner_answer(state, now, run_id, question, found))

    def _wake_and_log(self, records: Sequence[Change]) -> None:
        """Wake watchers, then log events. The order matters: a failing log must not delay watchers."""
        self.notify()
        for item in records:
            if isinstance(item, Event):
                self._log.info(item.message, event_kind=item.kind, run=item.run_id, subject=item.subject)

    def _perform(self, operation: Operation[T], loop: asyncio.AbstractEventLoop) -> Step[T]:
        step = operation(self.state, self.moment())
        signed: list[PlanRow | DenyRow] = [self.signed.plan_row(plan) for plan in step.plans]
        if step.deny:
            signed.append(self.signed.deny_row(step.deny))
        rows: list[Change] = [*step.records, *signed]
        if rows:
            self._store(rows)
        for row in signed:
            self.signed.publish(row)
        for item in step.records:
            if isinstance(item, DropRun):
                self.signed.forget(item.run_id)
        self.state = step.state
        if rows:  # scheduled here, because the caller may be cancelled before the store has finished
            loop.call_soon_threadsafe(self._wake_and_log, step.records)
        return step

    def _store(self, rows: list[Change]) -> None:
        try:
            self.store.apply(rows)
        except AtollError as error:
            self.store_failure = str(error)
            raise
        self.store_failure = ""


def _solve_question(question: Question, clock: Clock) -> Answer:
    # Imported here: SciPy takes a second to import, and only runs that need routes use it.
    from atoll.coordinator.planner.answer_question import answer_question

    return answer_question(question, clock)
