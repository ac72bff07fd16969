"""Rounds whose checkpoints nodes keep because a fork without a committed round begins with them. Pure."""

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
MAX_KEPT_ROUNDS = 4  # per run; nodes keep checkpoints for no more forks at a time


def forks_to_come(runs: Iterable[Run], memory: Mapping[str, RunMemory], source_id: str) -> dict[str, int]:
    """The round with which each fork of `source_id` that has no committed round begins, by the fork's run id."""
    found = {}
    for run in runs:
        fork = memory[run.run_id].spec.fork
        if fork is not None and fork.run == source_id and not run.head_round and TRANSITIONS[run.state]:
            found[run.run_id] = fork.round
    return found


def rounds_to_keep(runs: Iterable[Run], memory: Mapping[str, RunMemory], source_id: str) -> tuple[int, ...]:
    """Rounds of the run `source_id` with which forks without a committed round begin, the newest first.

    Until a fork's first commit, its genesis writer may be lost before other nodes have its weights.
    """
    needed = set(forks_to_come(runs, memory, source_id).values())
    return tuple(sorted(needed, reverse=True)[:MAX_KEPT_ROUNDS])


def rounds_held_elsewhere(state: State, run_id: str) -> tuple[int, ...]:
    """Rounds of a run that stay in its log, although no node of the run may hold them, because forks begin with them.

    These are the rounds of coming forks, and the newest rounds whose checkpoints nodes of other runs report. Reports of
    nodes on probation do not count, because they may be invented.
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
    """Update the rounds to keep after a run was created, committed its first round, or was stopped. Only for forks."""
    update_source(draft, draft.state.memory[run_id].spec)


def update_source(draft: Draft, fork_spec: RunSpec) -> None:
    """Like `update_kept_rounds`, by the run's spec, so that it also works for a deleted run."""
    state, fork = draft.state, fork_spec.fork
    if fork is None or fork.run not in state.runs:
        return
    kept = rounds_to_keep(state.runs.values(), state.memory, fork.run)
    if kept != state.memory[fork.run].kept_rounds:
        draft.remember(fork.run, kept_rounds=kept)
