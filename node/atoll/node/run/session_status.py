"""State of a training session as its owner and the coordinator see it: waiting, paused, training or standby.

The state follows from the plan, the run's state and the owner's pause. Every change is sent with a heartbeat at once.
"""

from __future__ import annotations

from atoll.core.plan import Plan
from atoll.node.run.node_context import NodeContext
from atoll.v1 import membership_pb2 as mb


class SessionStatus:
    """Decides whether the session may train, and reports its state in `LiveStatus`."""

    def __init__(self, context: NodeContext) -> None:
        self.pause_reason = ""  # of the owner's pause or a limit, for people; empty: the owner allows training
        self.pause_why: mb.NodeReason = mb.NODE_REASON_UNSPECIFIED
        self._context = context

    @property
    def may_train(self) -> bool:
        """Whether neither the owner nor the operator has paused training."""
        return not self.pause_reason and self._context.directives.run_state != mb.RUN_STATE_PAUSED

    @property
    def rests(self) -> bool:
        """Whether the owner or a limit has paused training. The node then leaves the plan after a last round."""
        return bool(self.pause_reason)

    @property
    def only_votes(self) -> bool:
        """Whether the plan keeps this paused node as a voter, because no quorum is possible without it."""
        plan = self._context.directives.plan
        return self.rests and plan is not None and self._context.identity.peer_id in plan.standbys

    @property
    def in_plan(self) -> bool:
        """Whether the newest plan has a place for this node."""
        plan = self._context.directives.plan
        return plan is not None and self._context.identity.peer_id in plan.members

    @property
    def must_write_genesis(self) -> bool:
        """Whether the coordinator ordered genesis and this node has not written it yet."""
        return self._context.directives.order == mb.ORDER_WRITE_GENESIS and self._context.status.genesis_report is None

    def adopt_plan(self) -> Plan:
        """Return the newest plan and show it in the status."""
        plan, status = self._context.directives.plan, self._context.status
        assert plan is not None
        status.plan_version, status.members = plan.version, len(plan.members)
        status.genesis_report = None  # a plan proves that the coordinator received it
        return plan

    def changed_since(self, plan_version: int, training: bool, resting: bool) -> bool:
        """Whether the plan changed or left this node out, or training or a rest starts or ends."""
        plan = self._context.directives.plan
        now = (plan.version, self.may_train, self.rests) if plan is not None else None
        return not self.in_plan or now != (plan_version, training, resting)

    def pause(self, reason: str, why: mb.NodeReason) -> None:
        """Pause for `reason`; an existing pause shows the new reason."""
        self.pause_reason, self.pause_why = reason, why
        if self._context.status.state == mb.NODE_STATE_PAUSED:
            self._context.status.detail, self._context.status.reason = reason, why

    def enter_loading(self, died: str, *, reloading: bool) -> None:
        """Report that a trainer loads. `died`: why the last one died, or empty. `reloading`: it loads other layers."""
        status = self._context.status
        if died:
            status.enter(mb.NODE_STATE_JOINING, died, mb.NODE_REASON_TRAINER_RESTARTS)
        elif reloading:
            status.enter(mb.NODE_STATE_CATCHING_UP, "loading the layers of the plan", mb.NODE_REASON_LOADING)
        else:
            status.enter(mb.NODE_STATE_JOINING, "loading the model and the corpus", mb.NODE_REASON_LOADING)

    def enter_waiting(self) -> None:
        """Report that the node is paused or waits for a plan."""
        if self.pause_reason:
            self._enter(mb.NODE_STATE_PAUSED, self.pause_reason, self.pause_why)
        else:
            self._enter(mb.NODE_STATE_READY, self._why_waiting(), mb.NODE_REASON_WAITS_FOR_PLAN)

    def waiting_is_outdated(self) -> bool:
        """Return whether `enter_waiting` would report another state or reason now."""
        status = self._context.status
        if bool(self.pause_reason) != (status.state == mb.NODE_STATE_PAUSED):
            return True
        return status.state == mb.NODE_STATE_READY and status.detail != self._why_waiting()

    def enter_following(self, plan: Plan, *, training: bool) -> None:
        """Report the node's activity under `plan`: it trains, is paused, or is a standby."""
        me = self._context.identity.peer_id
        if self.pause_reason and not training:
            self._enter(mb.NODE_STATE_PAUSED, self.pause_reason, self.pause_why)
        elif not training:
            self._enter(mb.NODE_STATE_PAUSED, "the operator paused the run", mb.NODE_REASON_RUN_PAUSED)
        elif me in plan.stages:
            self._enter(mb.NODE_STATE_TRAINING, "training", mb.NODE_REASON_UNSPECIFIED)
        else:
            span = plan.span(me)
            held = f"standby: holds layers {span.start} to {span.stop - 1}"
            self._enter(mb.NODE_STATE_READY, held, mb.NODE_REASON_STANDBY)

    def _enter(self, state: mb.NodeState, detail: str, reason: mb.NodeReason) -> None:
        self._context.status.enter(state, detail, reason)
        self._context.link.send_heartbeat_now()

    def _why_waiting(self) -> str:
        directives, needed = self._context.directives, self._context.spec.run.min_nodes
        if directives.notice:
            return f"ready, but {directives.notice}"
        starts = f" (the run starts with {needed} nodes)" if directives.plan is None and needed > 1 else ""
        return f"ready; waiting for a plan{starts}"
