"""The operator's calls about runs and their checkpoints. Each is one step of a state machine, or one read."""

# ruff: noqa: N802 - gRPC dictates the names of the methods

from __future__ import annotations

from atoll.coordinator.runs import checkpoint_orders, checkpoints, deletion, fork_source, lifecycle, recovery
from atoll.coordinator.services import views
from atoll.coordinator.services.admin_calls import MAX_ROUNDS, AdminCalls, Context
from atoll.coordinator.state import lookup
from atoll.coordinator.state.draft import Step
from atoll.coordinator.state.snapshot import State, StepTime
from atoll.coordinator.store.records import MAX_INTEGER, Checkpoint
from atoll.v1 import admin_pb2 as wire
from atoll.v1 import manifest_pb2

MAX_CREDITS = 10_000


class RunCalls(AdminCalls):
    """Calls of `admin.proto` about runs and checkpoints."""

    async def CreateRun(self, request: wire.CreateRunRequest, context: Context) -> wire.RunView:
        """Create a run from a TOML spec."""
        return await self._run(
            await self._controller.do(
                lambda state, now: lifecycle.create_run(state, now, request.spec_toml, start=request.start)
            )
        )

    async def StartRun(self, request: wire.RunRequest, context: Context) -> wire.RunView:
        """Start a run, or resume a paused one."""
        policy = self._controller.policy
        return await self._run(
            await self._controller.do(lambda state, now: lifecycle.start(state, now, request.run_id, policy))
        )

    async def PauseRun(self, request: wire.RunRequest, context: Context) -> wire.RunView:
        """Pause a run: its nodes wait."""
        return await self._run(
            await self._controller.do(lambda state, now: lifecycle.pause(state, now, request.run_id))
        )

    async def StopRun(self, request: wire.RunRequest, context: Context) -> wire.RunView:
        """End a run for good."""
        return await self._run(await self._controller.do(lambda state, now: lifecycle.stop(state, now, request.run_id)))

    async def RecoverRun(self, request: wire.RecoverRunRequest, context: Context) -> wire.RunView:
        """Resume a run from the newest state that connected nodes hold."""
        return await self._run(
            await self._controller.do(
                lambda state, now: recovery.recover(state, now, request.run_id, force=request.force)
            )
        )

    async def DeleteRun(self, request: wire.DeleteRunRequest, context: Context) -> wire.DeleteRunResponse:
        """Forget a run for good."""
        found = await self._controller.do(
            lambda state, now: deletion.delete(state, now, self._controller.policy, request.run_id)
        )
        run = found.run
        return wire.DeleteRunResponse(
            run_id=run.run_id, head_round=run.head_round, nodes=found.nodes, tokens=found.tokens
        )

    async def FindForkSource(self, request: wire.ForkSourceRequest, context: Context) -> wire.ForkSourceView:
        """A committed round of a run with which another run can begin, and the nodes that hold it."""
        state = self._controller.state
        run_id, number = lookup.run(state, request.run_id).run_id, min(request.round, MAX_INTEGER)
        rows = await self._controller.read(lambda store: store.rounds(run_id, number - 1, MAX_ROUNDS) if number else ())
        state = self._controller.state
        logged = fork_source.logged_hash(state, run_id, [row for row in rows if row.number == number])
        return views.fork_source_view(
            state, fork_source.find(state, run_id, number, request.manifest_hash, logged=logged)
        )

    async def GetRun(self, request: wire.RunRequest, context: Context) -> wire.RunView:
        """A run with its evaluations."""
        return await self._run(lookup.run(self._controller.state, request.run_id))

    async def ListRuns(self, request: wire.ListRunsRequest, context: Context) -> wire.ListRunsResponse:
        """All runs, the oldest first, without evaluations."""
        state = self._controller.state
        runs = sorted(state.runs.values(), key=lambda run: run.created_ms)
        now = self._controller.moment().unix_ms
        return wire.ListRunsResponse(runs=[views.run_view(state, run, now) for run in runs])

    async def ListCredits(self, request: wire.ListCreditsRequest, context: Context) -> wire.ListCreditsResponse:
        """What nodes contributed to a run."""
        state, limit = self._controller.state, min(request.limit or MAX_CREDITS, MAX_CREDITS)
        run_id = lookup.run(state, request.run_id).run_id
        memory = state.memory[run_id]
        return wire.ListCreditsResponse(
            run_id=run_id,
            tokens=sum(item.tokens for item in memory.credits.values()),
            nodes=len(memory.credit_ranks),
            credits=views.credit_views(state, run_id, limit),
        )

    async def ListCheckpoints(
        self, request: wire.ListCheckpointsRequest, context: Context
    ) -> wire.ListCheckpointsResponse:
        """Checkpoints that nodes of a run reported, the newest round first."""
        state = self._controller.state
        found = checkpoints.checkpoints_of_run(state, lookup.run(state, request.run_id).run_id)
        return wire.ListCheckpointsResponse(checkpoints=[views.checkpoint_view(state, item) for item in found])

    async def OrderCheckpoint(
        self, request: wire.OrderCheckpointRequest, context: Context
    ) -> wire.OrderCheckpointResponse:
        """Order connected nodes to write a checkpoint, or repeat the order. Returns its progress."""
        wanted = min(request.round, MAX_INTEGER)

        def order(state: State, now: StepTime) -> Step[wire.OrderCheckpointResponse]:
            step = checkpoint_orders.order(state, now, request.run_id, wanted)
            return Step(step.state, views.checkpoint_progress(step.state, step.result), step.records)

        found = await self._controller.do(order)
        self._controller.notify()  # tell the nodes at once; the order has no row that would do so
        return found

    async def PullCheckpoint(self, request: wire.PullCheckpointRequest, context: Context) -> None:  # type: ignore[override]
        """Relay the files of one checkpoint, or of several that together hold all layers."""
        lenient, state = request.unverified, self._controller.state
        wanted = checkpoints.choose_for_pull(state, request.run_id, request.round, request.node, unverified=lenient)

        def check(item: Checkpoint, manifest: manifest_pb2.CommittedManifest) -> None:
            checkpoints.check_manifest(self._controller.state, item, manifest, unverified=lenient)

        await self._uploads.pull(wanted, check, context.write)
