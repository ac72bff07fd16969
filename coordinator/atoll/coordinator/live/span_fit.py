"""What spans of a run's model take. Loads NumPy when the first model is looked at, and not with the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.coordinator.state.snapshot import LiveNode, State

if TYPE_CHECKING:
    from atoll.coordinator.planner.span_memory import SpanMemory


def span_memory_of(state: State, run_id: str, table: bytes = b"") -> SpanMemory | None:
    """By the run's layer table, or before genesis by one that a node told; None where there is none to go by."""
    rows = state.runs[run_id].layers or table
    if not rows:
        return None
    from atoll.coordinator.planner.span_memory import span_memory

    return span_memory(rows, state.memory[run_id].spec)


def span_fits(state: State, run_id: str, peer: str, span: range) -> bool:
    """Whether these layers fit the memory that a node told, if it did, and the run has layers to go by."""
    model, live = span_memory_of(state, run_id), state.live.get(peer) or LiveNode(session=0, seen=0.0)
    return model is not None and model.fits(live.profile, span.start, span.stop - 1)
