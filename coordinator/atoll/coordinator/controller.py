"""The one place where the state changes: a step is computed, made durable, and only then seen by anyone.

Steps run one after the other on a thread of their own, so the event loop never waits for a disk and no lock
is needed; readers take `state`, which is immutable. If the store fails, the state stays as it was and the
caller gets the error: what was not stored did not happen. The operator's key signs plans and deny-lists here.
Questions to the planner take seconds: they have a thread of their own, and their answers come back as steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog
from google.protobuf.message import DecodeError

from atoll.coordinator.planner.question import Answer, Question
from atoll.coordinator.runs import machine
from atoll.coordinator.state.snapshot import Policy, State, Step, StepTime
from atoll.coordinator.store.records import Change, DenyRow, Event, PlanRow
from atoll.coordinator.store.store import Store
from atoll.core import log
from atoll.core.clock import Clock, unix_ms
from atoll.core.errors import AtollError, DatabaseCorrupt, Rejected
from atoll.core.identity import Identity
from atoll.core.membership import EMPTY_DENY_LIST, DenyList, MembershipVerifier, issue_deny_list
from atoll.core.plan import Plan, sign_plan, verify_plan
from atoll.v1 import common_pb2 as pb

T = TypeVar("T")
Operation = Callable[[State, StepTime], Step[T]]
TICK_SECONDS = 0.2


class Controller:
    """State, store and operator key under one roof."""

    def __init__(self, store: Store, operator: Identity, clock: Clock, policy: Policy) -> None:
        self.store = store
        self.operator = operator
        self.clock = clock
        self.policy = policy
        self.tick_failures = 0
        self.store_failure: str = ""  # why the last write failed; empty when it did not
        self._log: structlog.stdlib.BoundLogger = log.get("controller")
        self._thread = ThreadPoolExecutor(1, "controller")
        self._planner = ThreadPoolExecutor(1, "planner")
        self._change_events: set[asyncio.Event] = set()
        self._signed_plans: dict[str, pb.Signed] = {}
        self._signed_deny_list = issue_deny_list(
            operator, EMPTY_DENY_LIST.number, EMPTY_DENY_LIST.peer_ids, clock.unix()
        )
        self.state = self._restore()

    async def do(self, operation: Operation[T]) -> T:
        """Run one step and return its result once it is durable. Raises what the step or the store raises."""
        loop = asyncio.get_running_loop()
        step = await loop.run_in_executor(self._thread, self._perform, operation, loop)
        return step.result

    async def read(self, query: Callable[[Store], T]) -> T:
        """Read from the store without holding up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, query, self.store)

    async def run(self) -> None:
        """Tick and plan until cancelled. What fails is logged and tried again: members train on meanwhile."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(self.tick))
            group.create_task(self._repeat(self.answer_questions))

    async def _repeat(self, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            await action()

    async def tick(self) -> None:
        """What time alone brings about, run by run: one that fails does not hold up the others."""
        await self._attempt(lambda state, now: machine.tick_streams(state, now, self.policy))
        for run_id in self.state.runs:
            await self._attempt(lambda state, now, run_id=run_id: machine.tick_run(state, now, self.policy, run_id))  # type: ignore[misc]

    async def answer_questions(self) -> None:
        """Ask the planner what runs want to know, one after the other, and bring them its answers."""
        for run_id, memory in self.state.memory.items():
            if memory.question is not None:
                await self._attempt_answer(run_id, memory.question)

    async def plan(self, question: Question) -> Answer:
        """The planner's answer; other calls are served meanwhile."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._planner, _solve_question, question, self.clock)

    @contextmanager
    def change_event(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever something durable changed."""
        changed = asyncio.Event()
        self._change_events.add(changed)
        try:
            yield changed
        finally:
            self._change_events.discard(changed)

    def signed_plan(self, run_id: str) -> pb.Signed | None:
        """The run's newest plan, signed."""
        return self._signed_plans.get(run_id)

    @property
    def signed_deny_list(self) -> pb.Signed:
        """The deny-list in force, signed."""
        return self._signed_deny_list

    def moment(self) -> StepTime:
        """Now."""
        return StepTime(unix_ms(self.clock), self.clock.monotonic())

    def close(self) -> None:
        """Finish what was begun, then close the store. A search in progress ends by itself, for nobody."""
        self._planner.shutdown(wait=False, cancel_futures=True)
        self._thread.shutdown(wait=True)
        self.store.close()

    def notify(self) -> None:
        """Wake everyone who watches."""
        for watcher in self._change_events:
            watcher.set()

    async def _attempt(self, operation: Operation[Any]) -> None:
        try:
            await self.do(operation)
        except Exception as error:  # supervision: the coordinator outlives a full disk
            self.tick_failures += 1
            self._log.error("tick failed", error=str(error), error_type=type(error).__name__)

    async def _attempt_answer(self, run_id: str, question: Question) -> None:
        try:
            found = await self.plan(question)
        except Exception as error:  # supervision: a mistake of the planner's must not end the coordinator
            self.tick_failures += 1
            self._log.error("planning failed", run=run_id, error=str(error), error_type=type(error).__name__)
            found = Answer(missing="the planner failed on this problem; the coordinator's log says how")
        await self._attempt(lambda state, now: machine.apply_planner_answer(state, now, run_id, question, found))

    def _announce(self, records: Sequence[Change]) -> None:
        """Wake first: a log that cannot be written must not keep news from anyone."""
        self.notify()
        for item in records:
            if isinstance(item, Event):
                self._log.info(item.message, event_kind=item.kind, run=item.run_id, subject=item.subject)

    def _perform(self, operation: Operation[T], loop: asyncio.AbstractEventLoop) -> Step[T]:
        step = operation(self.state, self.moment())
        plans = [PlanRow(plan.run_id, plan.version, self._sign_plan(plan), plan.issued_unix_ms) for plan in step.plans]
        deny = [DenyRow(step.deny.number, self._sign_deny_list(step.deny))] if step.deny else []
        rows: list[Change] = [*step.records, *plans, *deny]
        if rows:
            self._store(rows)
        for row in plans:
            self._signed_plans[row.run_id] = pb.Signed.FromString(row.sealed)
        for row_of_deny in deny:
            self._signed_deny_list = pb.Signed.FromString(row_of_deny.sealed)
        self.state = step.state
        if rows:  # from here, because the caller may have gone away meanwhile
            loop.call_soon_threadsafe(self._announce, step.records)
        return step

    def _store(self, rows: list[Change]) -> None:
        try:
            self.store.apply(rows)
        except AtollError as error:
            self.store_failure = str(error)
            raise
        self.store_failure = ""

    def _sign_plan(self, plan: Plan) -> bytes:
        return sign_plan(self.operator, plan).SerializeToString()

    def _sign_deny_list(self, deny: DenyList) -> bytes:
        sealed = issue_deny_list(self.operator, deny.number, deny.peer_ids, self.clock.unix())
        return sealed.SerializeToString()

    def _restore(self) -> State:
        contents = self.store.load()
        try:
            plans = tuple(self._verified_plan(row) for row in contents.plans)
            deny = self._verified_deny_list(contents.deny) if contents.deny else None
        except (Rejected, DecodeError) as error:
            raise DatabaseCorrupt(
                f"the database holds something that this coordinator's key did not sign: {error}",
                "database and keys must come from the same backup; nothing was changed",
            ) from error
        return machine.restore(contents, plans, deny, self.moment(), self.operator.public_key)

    def _verified_plan(self, row: PlanRow) -> Plan:
        sealed = pb.Signed.FromString(row.sealed)
        plan = verify_plan(sealed, self.operator.public_key, row.run_id)
        self._signed_plans[row.run_id] = sealed  # rows come in order of version: the newest stays
        return plan

    def _verified_deny_list(self, row: DenyRow) -> DenyList:
        self._signed_deny_list = pb.Signed.FromString(row.sealed)
        return MembershipVerifier(self.operator.public_key, "").verify_deny_list(self._signed_deny_list)


def _solve_question(question: Question, clock: Clock) -> Answer:
    from atoll.coordinator.planner.answer_question import answer_question  # loads SciPy: a second

    return answer_question(question, clock)
