"""Memory of the spans of a run's model. Loads NumPy at the first use of a model, not when the server starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.coordinator.live.attendance import live_of
from atoll.coordinator.state.snapshot import State

if TYPE_CHECKING:
    from atoll.coordinator.planner.span_memory import SpanMemory


def span_memory_of(state: State, run_id: str, table: bytes = b"") -> SpanMemory | None:
    """Span memory for the run's layer table, or before genesis for `table`; None if there is no usable table."""
    rows = state.runs[run_id].layers or table
    if not rows:
        return None
    from atoll.coordinator.planner.span_memory import span_memory

    return span_memory(rows, state.memory[run_id].spec)


def span_fits(state: State, run_id: str, peer: str, span: range) -> bool:
    """True if the run has a layer table and these layers fit the memory that the node reported, if any."""
    model = span_memory_of(state, run_id)
    return model is not None and model.fits(live_of(state, peer).profile, span.start, span.stop - 1)
