"""The operator's calls about a run's records: plans, rounds, metrics, events."""

# ruff: noqa: N802 - gRPC dictates the names of the methods

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

from atoll.coordinator.interceptors import refuse_retired
from atoll.coordinator.live import plan_apply
from atoll.coordinator.services import plan_views, views
from atoll.coordinator.services.admin_calls import MAX_ROUNDS, AdminCalls, Context
from atoll.coordinator.state import lookup
from atoll.coordinator.store.records import MAX_INTEGER, Event, Round
from atoll.coordinator.store.store import EventFilter, MetricsPage, Store
from atoll.core.errors import NotFound
from atoll.v1 import admin_pb2 as wire
from atoll.v1 import common_pb2 as pb

EVENT_BATCH = 500
MAX_TAIL = 10_000
FOLLOW_SECONDS = 30.0
MAX_METRICS_ROWS = 2000  # in one answer; a row takes some 200 bytes


class RecordCalls(AdminCalls):
    """Calls of `admin.proto` about plans, rounds, metrics and events."""

    async def GetPlan(self, request: wire.GetPlanRequest, context: Context) -> wire.PlanView:
        """A plan by version; 0: the newest."""
        state = self._controller.state
        run = lookup.run(state, request.run_id)
        version = min(request.version or run.plan_version, MAX_INTEGER)
        row = await self._controller.read(lambda store: store.plan(run.run_id, version)) if version else None
        if row is None:
            which = f"plan {request.version}" if request.version else "plan"
            missing = state.memory[run.run_id].no_plan_reason
            raise NotFound(
                f"run {run.run_id!r} has no {which} yet" + (f": {missing}" if missing else ""),
                "plan 1 is issued after genesis; see `atollctl run show`",
            )
        figures = await self._controller.read(lambda store: store.plan_figures(run.run_id))
        own = next((item for item in figures if item.version == version), None)
        state, wishes = self._present(run.run_id), self._controller.policy.preferences
        return plan_views.plan_view(state, pb.Signed.FromString(row.sealed), own, wishes)

    async def PlanHistory(self, request: wire.PlanHistoryRequest, context: Context) -> wire.PlanHistoryResponse:
        """Figures of all plans of a run, the oldest first."""
        run = lookup.run(self._controller.state, request.run_id)
        rows = await self._controller.read(lambda store: store.plan_figures(run.run_id))
        return wire.PlanHistoryResponse(plans=[plan_views.figures_view(row) for row in rows])

    async def ApplyPlan(self, request: wire.ApplyPlanRequest, context: Context) -> wire.ApplyPlanResponse:
        """Plan now. Issue the plan, or with `dry_run` only return the changes."""
        run = lookup.run(self._controller.state, request.run_id)
        question = plan_apply.operator_question(
            self._controller.state, self._controller.moment(), run.run_id, self._controller.policy
        )
        found = await self._controller.plan(question)
        issued = None
        if not request.dry_run:
            issued = await self._controller.do(
                lambda state, now: plan_apply.apply(state, now, run.run_id, question, found)
            )
        return plan_views.proposal_view(self._present(run.run_id), run.run_id, question, found, issued)

    async def ListRounds(self, request: wire.ListRoundsRequest, context: Context) -> wire.ListRoundsResponse:
        """Rounds after a number, or the newest ones; the oldest first."""
        run_id = lookup.run(self._controller.state, request.run_id).run_id
        limit, after_round = min(request.limit or 1000, MAX_ROUNDS), min(request.after_round, MAX_INTEGER)

        def wanted(store: Store) -> tuple[Round, ...]:
            newest = request.newest
            return store.newest_rounds(run_id, limit) if newest else store.rounds(run_id, after_round, limit)

        rows = await self._controller.read(wanted)
        state = self._present(run_id)
        return wire.ListRoundsResponse(rounds=[views.round_view(state, row) for row in rows])

    async def ListMetrics(self, request: wire.ListMetricsRequest, context: Context) -> wire.ListMetricsResponse:
        """A page of the nodes' metrics of rounds."""
        state = self._controller.state
        run_id = lookup.run(state, request.run_id).run_id
        page = MetricsPage(
            limit=min(request.limit or MAX_METRICS_ROWS, MAX_METRICS_ROWS),
            since_round=min(request.since_round, MAX_INTEGER),
            after_peer_id=request.after_peer_id,
            peers=lookup.identities(state, lookup.node(state, request.node)) if request.node else (),
            newest=request.newest,
        )
        rows = await self._controller.read(lambda store: store.node_metrics(run_id, page))
        return wire.ListMetricsResponse(rows=[views.metrics_row(self._controller.state, row) for row in rows])

    async def Events(self, request: wire.EventsRequest, context: Context) -> None:  # type: ignore[override]
        """Stream matching events after an id. With `follow`, continue until the caller leaves or the server stops."""
        wanted = self._event_filter(request)
        after_id = min(request.after_id, MAX_INTEGER)
        tail = min(request.tail, MAX_TAIL)
        with self._controller.change_event() as changed:
            while not self._stopping.is_set():
                refuse_retired(context, self._keys.authorities)
                looked_at = self._controller.state.last_event_id  # the next read need not read these again
                rows = await self._controller.read(partial(_events, wanted, after_id, tail))
                for row in rows:
                    await context.write(views.event_view(row))
                    after_id = row.event_id
                if len(rows) == EVENT_BATCH and not tail:
                    continue
                after_id, tail = max(after_id, looked_at), 0
                if not request.follow:
                    return
                with suppress(TimeoutError):  # reads again after a while in case a wake-up was missed
                    async with asyncio.timeout(FOLLOW_SECONDS):
                        await changed.wait()
                changed.clear()

    def _event_filter(self, request: wire.EventsRequest) -> EventFilter:
        state = self._controller.state
        since_ms = self._controller.moment().unix_ms - 1000 * request.since_seconds if request.since_seconds else 0
        return EventFilter(
            run_id=lookup.run(state, request.run_id).run_id if request.run_id else "",
            subjects=lookup.identities(state, lookup.node(state, request.node)) if request.node else (),
            kind=request.kind,
            since_ms=max(0, since_ms),
        )


def _events(wanted: EventFilter, after_id: int, tail: int, store: Store) -> tuple[Event, ...]:
    """The next batch of matching events, or the newest `tail` of them."""
    if tail:
        return store.newest_events(after_id, tail, wanted)
    return store.events(after_id, EVENT_BATCH, wanted)
