"""The controller: nothing is seen before it is stored, and nothing stored is taken on trust."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from support.memory_store import MemoryStore
from unit.coordinator.routed import RoutedWorld
from unit.coordinator.world import RUN, World, spec_toml

from atoll.coordinator import controller as coordinator
from atoll.coordinator.controller import Controller
from atoll.coordinator.planner.answer_question import answer_question
from atoll.coordinator.planner.question import Answer, Question
from atoll.coordinator.runs import admission, bans, departure, lifecycle
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.snapshot import Policy
from atoll.coordinator.store.records import DenyRow, PlanRow, Record
from atoll.core.clock import Clock, ManualClock
from atoll.core.errors import DatabaseCorrupt, DataDirUnusable
from atoll.core.identity import Identity
from atoll.core.plan import verify_plan

TOKEN = admission.TokenRequest("0" * 12, "hash", "", 1, 60, ("node",))


class FullDisk(MemoryStore):
    """Fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False

    def apply(self, records: Sequence[Record]) -> None:
        if self.full:
            raise DataDirUnusable("the disk is full")
        super().apply(records)


async def test_a_step_that_is_not_stored_has_no_effect() -> None:
    store = FullDisk()
    controller = Controller(store, Identity.generate(), ManualClock(), Policy())
    store.full = True
    with controller.change_event() as changed:
        with pytest.raises(DataDirUnusable):
            await controller.do(lambda state, now: lifecycle.create_run(state, now, spec_toml(), start=True))
        assert controller.state.runs == {}
        assert controller.store_failure == "the disk is full"
        store.full = False
        run = await controller.do(lambda state, now: lifecycle.create_run(state, now, spec_toml(), start=True))
        assert controller.store_failure == ""
        await changed.wait()
    assert controller.state.runs[RUN] == run
    controller.close()


async def test_a_run_that_cannot_advance_does_not_hold_up_another(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(MemoryStore(), Identity.generate(), ManualClock(), Policy())
    for name in ("a", "b"):
        text = spec_toml(name=name)
        await controller.do(lambda state, now, text=text: lifecycle.create_run(state, now, text, start=True))  # type: ignore[misc]
    advanced = []

    def advance(_draft: Draft, run_id: str, _policy: Policy) -> None:
        advanced.append(run_id)
        if run_id == "a":
            raise ValueError("a bug")

    monkeypatch.setattr(lifecycle, "advance", advance)
    await controller.tick()
    assert (advanced, controller.tick_failures) == (["a", "b"], 1)
    controller.close()


async def test_bans_and_plans_are_signed_stored_and_restored() -> None:
    world, store, operator = World(), MemoryStore(), Identity.generate()
    world.train("ann", "bob")
    store.apply(world.records)
    first = Controller(store, operator, ManualClock(), Policy())
    await first.do(lambda state, now: bans.ban(state, now, "ann", ""))
    first.close()
    again = Controller(store, operator, ManualClock(), Policy())
    assert again.state.deny.peer_ids == {world.identities["ann"].peer_id}
    assert again.signed.deny_list == first.signed.deny_list
    again.close()


async def test_a_plan_that_is_due_is_sealed_for_members() -> None:
    world, operator = World(), Identity.generate()
    world.train("ann", "bob")
    prompt = Policy(debounce_seconds=0.0, plan_interval_seconds=0.0)
    clock = ManualClock()
    clock.advance(world.now.monotonic)
    controller = Controller(MemoryStore(), operator, clock, prompt)
    controller.state = world.state
    peer = world.identities["bob"].peer_id
    await controller.do(lambda state, now: departure.leave(state, now, peer, ""))
    for _ in range(3):
        await controller.tick()
    sealed = controller.signed.plan(RUN)
    assert sealed is not None
    assert verify_plan(sealed, operator.public_key, RUN).members == (world.identities["ann"].peer_id,)
    controller.close()


def with_question() -> RoutedWorld:
    world = RoutedWorld(answers=False)
    world.begin(ann=6, bob=6)
    assert world.state.memory[RUN].question is not None
    return world


async def test_while_the_planner_thinks_the_coordinator_works_and_then_the_plan_is_sealed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, operator, may_end = with_question(), Identity.generate(), threading.Event()

    def slowly(question: Question, clock: Clock) -> Answer:
        may_end.wait()
        return answer_question(question, clock)

    monkeypatch.setattr(coordinator, "_solve_question", slowly)
    controller = Controller(MemoryStore(), operator, ManualClock(), world.policy)
    controller.state = world.state
    planning = asyncio.create_task(controller.answer_questions())
    await controller.do(lambda state, now: admission.create_token(state, now, TOKEN))
    assert controller.signed.plan(RUN) is None
    may_end.set()
    await planning
    sealed = controller.signed.plan(RUN)
    assert sealed is not None
    assert len(verify_plan(sealed, operator.public_key, RUN).routes) == 1
    controller.close()


async def test_a_planner_failure_is_reported_and_affects_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    world = with_question()

    def broken(_question: Question, _clock: Clock) -> Answer:
        raise ZeroDivisionError

    monkeypatch.setattr(coordinator, "_solve_question", broken)
    controller = Controller(MemoryStore(), Identity.generate(), ManualClock(), world.policy)
    controller.state = world.state
    await controller.answer_questions()
    assert controller.tick_failures == 1
    assert "the planner failed" in controller.state.memory[RUN].no_plan_reason
    controller.close()


@pytest.mark.parametrize("row", [PlanRow(RUN, 1, b"", 0), DenyRow(1, b"")])
def test_stored_documents_signed_by_another_key_are_refused(row: Record) -> None:
    world, store = World(), MemoryStore()
    world.create_run()
    store.apply([*world.records, row])
    with pytest.raises(DatabaseCorrupt, match="did not sign"):
        Controller(store, Identity.generate(), ManualClock(), Policy())
