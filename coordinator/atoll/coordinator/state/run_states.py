"""States of a run and the transitions between them. Pure."""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.state.draft import Draft
from atoll.core.errors import InvalidTransition

TRANSITIONS: dict[str, frozenset[str]] = {
    "CREATED": frozenset({"WAITING", "STOPPED"}),
    "WAITING": frozenset({"GENESIS", "PAUSED", "STOPPED"}),
    "GENESIS": frozenset({"WAITING", "TRAINING", "PAUSED", "STOPPED"}),
    "TRAINING": frozenset({"PAUSED", "FINISHED", "STOPPED"}),
    "PAUSED": frozenset({"WAITING", "TRAINING", "FINISHED", "STOPPED"}),
    "FINISHED": frozenset(),
    "STOPPED": frozenset(),
}


def transition_run(draft: Draft, run_id: str, target: str, why: str) -> None:
    """Move a run to another state. Raises `InvalidTransition`."""
    run = draft.state.runs[run_id]
    if target not in TRANSITIONS[run.state]:
        possible = ", ".join(sorted(TRANSITIONS[run.state])).lower()
        raise InvalidTransition(
            f"run {run_id!r} is {run.state.lower()}: it cannot become {target.lower()}",
            f"from here it can become: {possible}" if possible else "its state is final; create another run",
        )
    draft.put(replace(run, state=target))
    draft.remember(run_id, standby_fetches={}, copy_fetches={})
    if run.state == "PAUSED":
        draft.remember(run_id, resumed_ms=draft.now.unix_ms)
    if draft.state.memory[run_id].preparation is not None:  # the planner is asked again later
        draft.remember(run_id, preparation=None, answered_question=None)
    draft.event(f"run.{target.lower()}", run_id, run_id, why)


def finish_if_due(draft: Draft, run_id: str) -> None:
    """Finish the run once it has committed the tokens of its spec."""
    run, spec = draft.state.runs[run_id], draft.state.memory[run_id].spec
    if run.committed_tokens >= spec.run.stop_tokens and run.state in ("TRAINING", "PAUSED"):
        transition_run(
            draft, run_id, "FINISHED", f"the run reached {run.committed_tokens} tokens in {run.head_round} rounds"
        )
