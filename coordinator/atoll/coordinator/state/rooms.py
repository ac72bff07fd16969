"""What spans of a run's model take. Loads NumPy when the first model is looked at, and not with the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.coordinator.state.snapshot import State

if TYPE_CHECKING:
    from atoll.coordinator.planner.capacity import Room


def room_of(state: State, run_id: str, table: bytes = b"") -> Room | None:
    """By the run's layer table, or before genesis by one that a node told; None where there is none to go by."""
    rows = state.runs[run_id].layers or table
    if not rows:
        return None
    from atoll.coordinator.planner.capacity import room

    return room(rows, state.memory[run_id].spec)
