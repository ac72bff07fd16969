"""Life cycle of a run: from created through genesis to training and its end. Pure.

    CREATED → WAITING → GENESIS → TRAINING → FINISHED
                 ↖________|           ↕
                                   PAUSED          any but FINISHED → STOPPED

`advance` moves a run as far as its nodes allow. The other edges are the operator's orders. `live/plan_upkeep.py`
decides which plan a training run follows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from atoll.coordinator.live.attendance import (
    can_still_write_genesis,
    corpus_expected,
    most_common_corpus,
    nodes_with_other_corpus,
    only_strangers_are_there,
    ready_nodes,
)
from atoll.coordinator.live.plan_upkeep import update_plan
from atoll.coordinator.live.span_fit import span_memory_of
from atoll.coordinator.runs import fork_source
from atoll.coordinator.state import lookup
from atoll.coordinator.state.draft import Draft, Step, charge_row
from atoll.coordinator.state.kept_rounds import update_kept_rounds
from atoll.coordinator.state.known_nodes import known_nodes
from atoll.coordinator.state.run_memory import RunMemory
from atoll.coordinator.state.run_states import transition_run
from atoll.coordinator.state.snapshot import Policy, State, StepTime
from atoll.coordinator.store.records import Run
from atoll.core.errors import AlreadyExists, InvalidTransition, RunSpecError
from atoll.core.run_spec import parse_run_spec
from atoll.core.units import bytes_text

NEEDS_KNOWN_NODE = (
    "all nodes that are there are on probation; start one of the others, or `atollctl node vouch` for one of these"
)


def create_run(state: State, now: StepTime, spec_toml: str, *, start: bool) -> Step[Run]:
    """Create a run from a spec. Raises `RunSpecError`, `AlreadyExists`, and for a fork the errors of `check_spec`."""
    spec = parse_run_spec(spec_toml)
    stored = spec.resolved_toml()
    if parse_run_spec(stored, "the spec with its defaults") != spec:  # a restarted coordinator could not read it
        raise RunSpecError("the run spec does not survive being written as TOML", "simplify its strings")
    name = spec.run.name
    if name in state.runs:
        raise AlreadyExists(f"a run named {name!r} exists already", "give the new one another run.name")
    fork_source.check_spec(state, spec)
    draft = Draft(state, now)
    before = state.deleted_runs.get(name)
    plans_before = before.plan_version if before is not None else 0
    draft.put(Run(run_id=name, spec_toml=stored, state="CREATED", created_ms=now.unix_ms, plans_before=plans_before))
    draft.drop_traces({name} & state.deleted_runs.keys(), frozenset())
    draft.add_memory(name, RunMemory(spec=spec))
    update_kept_rounds(draft, name)
    begins = f", from round {spec.fork.round} of run {spec.fork.run}" if spec.fork is not None else ""
    draft.event("run.created", name, name, f"run {name} created: {spec.run.stop_tokens} tokens{begins}")
    if start:
        transition_run(draft, name, "WAITING", "the run was started")
    return draft.done(draft.state.runs[name])


def start(state: State, now: StepTime, run_id: str, policy: Policy) -> Step[Run]:
    """Start a created run, or resume a paused one. Raises `NotFound`, `InvalidTransition`."""
    run = lookup.run(state, run_id)
    draft = Draft(state, now)
    if run.state not in ("CREATED", "PAUSED"):
        raise InvalidTransition(
            f"run {run.run_id!r} is {run.state.lower()}: only a created or paused run can be started",
            "see `atollctl run show`",
        )
    if lost := fork_source.lost_source(state, run.run_id):
        raise InvalidTransition(f"run {run.run_id!r} cannot begin: {lost}")
    reason = "the run was resumed" if run.state == "PAUSED" else "the run was started"
    transition_run(draft, run.run_id, "TRAINING" if run.genesis else "WAITING", reason)
    draft.remember(run.run_id, no_plan_before=now.monotonic + policy.resume_seconds, changed_since=None)
    return draft.done(draft.state.runs[run.run_id])


def pause(state: State, now: StepTime, run_id: str) -> Step[Run]:
    """Pause a run: its nodes wait. Raises `NotFound`, `InvalidTransition`."""
    return _transition_by_operator(state, now, run_id, "PAUSED", "the operator paused the run")


def stop(state: State, now: StepTime, run_id: str) -> Step[Run]:
    """End a run for good. Raises `NotFound`, `InvalidTransition`."""
    return _transition_by_operator(state, now, run_id, "STOPPED", "the operator stopped the run")


def advance(draft: Draft, run_id: str, policy: Policy) -> None:
    """Move a run to its next state, if its nodes allow it."""
    run = draft.state.runs[run_id]
    match run.state:
        case "WAITING":
            _begin_genesis_if_ready(draft, run_id)
        case "GENESIS" if not run.genesis:
            _replace_late_genesis_writer(draft, run_id, policy)
        case "GENESIS" | "TRAINING":
            update_plan(draft, run_id, policy)


# --- waiting and genesis ---------------------------------------------------------------------------


def _note_missing(draft: Draft, run_id: str, missing: str) -> None:
    if missing != draft.state.memory[run_id].no_plan_reason:
        draft.remember(run_id, no_plan_reason=missing)
        if missing:
            draft.event("plan.impossible", run_id, run_id, f"genesis waits: {missing}")


def _begin_genesis_if_ready(draft: Draft, run_id: str) -> None:
    state = draft.state
    needed = state.memory[run_id].spec.run.min_nodes
    digest = most_common_corpus(state, run_id)
    if digest != state.memory[run_id].most_common_corpus_digest:
        draft.remember(run_id, most_common_corpus_digest=digest)
    ready = ready_nodes(state, run_id, digest)
    missing = fork_source.lost_source(state, run_id)
    if not missing and only_strangers_are_there(state, run_id):
        missing = NEEDS_KNOWN_NODE
    if digest and len(ready) >= needed and not missing:
        missing = _memory_shortage(state, run_id, ready) or fork_source.missing_writer(state, run_id, ready)
    _note_missing(draft, run_id, missing)
    if not digest or len(ready) < needed:
        _log_corpus_mismatches(draft, run_id, digest)
        return
    if missing:
        return
    draft.put(replace(state.runs[run_id], corpus_digest=digest))
    transition_run(draft, run_id, "GENESIS", f"{len(ready)} of {needed} nodes are ready")
    _choose_genesis_writer(draft, run_id, ready)


def _memory_shortage(state: State, run_id: str, ready: list[str]) -> str:
    """The memory that these nodes lack to hold the model together.

    Empty if it suffices, or if no node has reported a layer table.
    """
    tables = Counter(state.live[peer].layers for peer in ready if state.live[peer].layers)
    model = span_memory_of(state, run_id, max(tables, key=lambda table: tables[table], default=b""))
    if model is None:
        return ""
    held = sum(model.most_layers(state.live[peer].profile) for peer in ready)
    if held >= model.layers:
        return ""
    missing = bytes_text(model.device_bytes(held, model.layers - 1))
    return f"needs {missing} more memory: the {len(ready)} ready nodes hold {held} of {model.layers} layers together"


def _writer_may_deliver(state: State, run_id: str) -> bool:
    memory = state.memory[run_id]
    writer = memory.genesis_writer
    may = writer and writer not in memory.failed_genesis_writers and can_still_write_genesis(state, run_id, writer)
    return bool(may and known_nodes(state, [writer]))


def _replace_late_genesis_writer(draft: Draft, run_id: str, policy: Policy) -> None:
    state, memory = draft.state, draft.state.memory[run_id]
    ready = ready_nodes(state, run_id, corpus_expected(state, run_id))
    in_time = draft.now.monotonic - memory.genesis_writer_since < policy.genesis_seconds
    if in_time and _writer_may_deliver(state, run_id):
        return
    able = fork_source.writers(state, run_id, ready)
    if len(ready) >= memory.spec.run.min_nodes and able:
        nobody_else = memory.genesis_writer in able and set(able) <= memory.failed_genesis_writers
        if not (in_time and nobody_else):
            _choose_genesis_writer(draft, run_id, ready)
        return
    draft.put(replace(state.runs[run_id], corpus_digest=""))
    draft.remember(run_id, genesis_writer="")
    transition_run(draft, run_id, "WAITING", "too few ready nodes are left for genesis")


def _choose_genesis_writer(draft: Draft, run_id: str, ready: list[str]) -> None:
    """Choose the writer: the lowest peer id that has not failed; if all have failed, start again with all."""
    memory, able = draft.state.memory[run_id], fork_source.writers(draft.state, run_id, ready)
    passed = memory.failed_genesis_writers | ({memory.genesis_writer} if memory.genesis_writer else set())
    fresh = [peer for peer in able if peer not in passed]
    writer = fresh[0] if fresh else able[0]
    draft.remember(
        run_id,
        genesis_writer=writer,
        genesis_writer_since=draft.now.monotonic,
        failed_genesis_writers=passed if fresh else frozenset(),
        no_plan_reason="",
    )
    name = draft.state.nodes[writer].name
    draft.event("run.genesis-writer", run_id, writer, f"{name} was asked to write the genesis anchor")


def _log_corpus_mismatches(draft: Draft, run_id: str, digest: str) -> None:
    """Log eligible nodes whose corpus differs from the most common one, once per digest.

    They do not count for genesis.
    """
    memory = draft.state.memory[run_id]
    for node, other in nodes_with_other_corpus(draft.state, run_id, digest):
        if memory.logged_corpus_mismatches.get(node.peer_id) == other:
            continue
        memory = replace(memory, logged_corpus_mismatches={**memory.logged_corpus_mismatches, node.peer_id: other})
        draft.remember(run_id, logged_corpus_mismatches=memory.logged_corpus_mismatches)
        if charge_row(draft, node.peer_id):
            message = f"{node.name} has corpus {other[:12]}…, most nodes have {digest[:12]}…: it does not count"
            draft.event("node.corpus-differs", run_id, node.peer_id, message)


def _transition_by_operator(state: State, now: StepTime, run_id: str, target: str, why: str) -> Step[Run]:
    run = lookup.run(state, run_id)
    draft = Draft(state, now)
    transition_run(draft, run.run_id, target, why)
    update_kept_rounds(draft, run.run_id)
    return draft.done(draft.state.runs[run.run_id])
