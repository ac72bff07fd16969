"""Rounds whose checkpoints nodes keep because a run that has committed nothing yet begins with them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.known_nodes import is_on_probation
from atoll.coordinator.state.run_memory import RunMemory
from atoll.coordinator.state.run_states import TRANSITIONS
from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import Run
from atoll.core.run_spec import RunSpec

_ROUNDS_ELSEWHERE = 256
MAX_KEPT_ROUNDS = 4  # of a run; its nodes keep no checkpoints for more forks at a time


def forks_to_come(runs: Iterable[Run], memory: Mapping[str, RunMemory], source_id: str) -> dict[str, int]:
    """Forks of the run `source_id` that have no genesis yet, by run id: the round with which each begins."""
    found = {}
    for run in runs:
        fork = memory[run.run_id].spec.fork
        if fork is not None and fork.run == source_id and not run.head_round and TRANSITIONS[run.state]:
            found[run.run_id] = fork.round
    return found


def rounds_to_keep(runs: Iterable[Run], memory: Mapping[str, RunMemory], source_id: str) -> tuple[int, ...]:
    """Rounds of the run `source_id` with which forks begin that have committed nothing yet, the newest first.

    Until then, the writer of a genesis may be lost before others have its weights.
    """
    needed = set(forks_to_come(runs, memory, source_id).values())
    return tuple(sorted(needed, reverse=True)[:MAX_KEPT_ROUNDS])


def rounds_held_elsewhere(state: State, run_id: str) -> tuple[int, ...]:
    """Rounds of a run that stay in its log although no node of it may hold them: forks begin with them.

    These are the rounds of forks to come, and the newest of which nodes of other runs report checkpoints. Nodes on
    probation could claim any, so theirs do not count.
    """
    head = state.runs[run_id].head_round
    claims = (
        it
        for peer, live in state.live.items()
        if live.former_checkpoints and not is_on_probation(state, peer)
        for it in live.former_checkpoints
    )
    former = {it.round for it in claims if it.run_id == run_id and it.round <= head}
    newest = sorted(former, reverse=True)[:_ROUNDS_ELSEWHERE]
    return tuple(sorted({*state.memory[run_id].kept_rounds, *newest}))


def update_kept_rounds(draft: Draft, run_id: str) -> None:
    """Call it after a run was created, has its first round, or was stopped. Does nothing unless the run is a fork."""
    update_source(draft, draft.state.memory[run_id].spec)


def update_source(draft: Draft, fork_spec: RunSpec) -> None:
    """The same by the spec of the run, also of one that was deleted."""
    state, fork = draft.state, fork_spec.fork
    if fork is None or fork.run not in state.runs:
        return
    kept = rounds_to_keep(state.runs.values(), state.memory, fork.run)
    if kept != state.memory[fork.run].kept_rounds:
        draft.remember(fork.run, kept_rounds=kept)
