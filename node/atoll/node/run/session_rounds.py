"""Creates the round engine of a training session, with its services and the coordinator's vote."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from atoll.core.errors import AtollError
from atoll.core.manifest import Head, changed_layers
from atoll.core.plan import Plan
from atoll.core.quorum import Ballot, LastVote
from atoll.core.round_id import RoundId
from atoll.node.control.coordinator_link import CoordinatorLink
from atoll.node.exchange.exchange_server import ExchangeServer
from atoll.node.rounds import types as rt
from atoll.node.rounds.callbacks import RoundCallbacks
from atoll.node.rounds.engine import AveragingEngine
from atoll.node.rounds.installed_state import InstalledState
from atoll.node.rounds.policy import policies
from atoll.node.run.node_context import NodeContext
from atoll.node.state.anchor import AnchorState
from atoll.node.trainer.trainer import Trainer
from atoll.v1 import membership_pb2 as mb


def make_engine(
    context: NodeContext,
    trainer: Trainer,
    state: AnchorState,
    exchanges: ExchangeServer,
    head: Head,
    plan: Plan,
    *,
    on_head_moved: Callable[[Head], None],
    on_evaluation: Callable[[mb.EvaluationReport], None],
) -> AveragingEngine:
    """Build the engine that moves `state` from `head` in rounds under `plan`."""
    return AveragingEngine(
        context,
        policies(context.spec, trainer.facts.layer_offsets),
        trainer,
        InstalledState(head, state, context.manifests),
        plan,
        votes=context.votes,
        told=context.directives.promised_before,
        exchanges=exchanges,
        counters=context.status.counters,
        callbacks=RoundCallbacks(
            committed=on_head_moved,
            report=context.link.report,
            evaluated=on_evaluation,
            audited=context.link.report,
            ask_coordinator=partial(ask_coordinator, context.link),
            plan_newer_than=context.directives.plan_newer_than,
            plan_shared=context.directives.accept_plan,
        ),
    )


async def ask_coordinator(link: CoordinatorLink, round_id: RoundId, proposal: bytes) -> rt.CoordinatorVote:
    """Ask the coordinator's seat for a promise or a vote; not granted if it cannot be reached."""
    try:
        answer = await link.vote(mb.VoteRequest(round=round_id.to_proto(), proposal=proposal))
    except AtollError as error:
        return rt.CoordinatorVote(round_id, proposal, granted=False, voted=None, vote=None, reason=str(error))
    ballot = answer.accepted_ballot
    voted = LastVote(Ballot(ballot.plan_version, ballot.attempt), answer.accepted_proposal)
    return rt.CoordinatorVote(
        round_id,
        proposal,
        granted=answer.granted,
        voted=voted if answer.HasField("accepted_ballot") else None,
        vote=answer.vote if answer.HasField("vote") else None,
        reason=answer.reason,
    )


def is_only_holder(plan: Plan | None, peer_id: str, head: Head) -> bool:
    """Return whether this node is on a route and alone held some changed layer in the head's round."""
    if plan is None or plan.is_replica(peer_id):
        return False
    mine, changed = plan.span(peer_id), changed_layers(head.manifest)
    layers = range(max(mine.start, changed.start), min(mine.stop, changed.stop))
    present = head.present | {peer_id}
    return any(plan.holders(range(layer, layer + 1)) & present == {peer_id} for layer in layers)
