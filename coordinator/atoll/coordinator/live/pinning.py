"""Pins: the operator's orders that a node holds exactly these layers, or is excluded from training. Durable. Pure."""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.live.attendance import PINNED_OUT, should_train
from atoll.coordinator.live.span_fit import span_memory_of
from atoll.coordinator.state import lookup
from atoll.coordinator.state.draft import Draft, Step
from atoll.coordinator.state.snapshot import State, StepTime
from atoll.coordinator.store.records import Node
from atoll.core.errors import PlanInputInvalid
from atoll.core.units import bytes_text
from atoll.v1 import plan_pb2

Span = tuple[int, int]


def pin(state: State, now: StepTime, text: str, span: Span | None) -> Step[Node]:
    """Pin a node to layers (first, last), or out. Raises `NotFound`, `Ambiguous`, `PlanInputInvalid`."""
    node = lookup.node(state, text)
    if span is not None:
        _check_span(state, node, span)
    pinned = replace(node, pin=PINNED_OUT if span is None else f"{span[0]}-{span[1]}")
    _check_together(state, pinned)
    change = "is pinned out" if span is None else f"is pinned to layers {span[0]}–{span[1]}"
    return _put(state, now, node, pinned, "node.pinned", change)


def unpin(state: State, now: StepTime, text: str) -> Step[Node]:
    """Remove a node's pin, if it has one. Raises `NotFound`, `Ambiguous`."""
    node = lookup.node(state, text)
    return _put(state, now, node, replace(node, pin=""), "node.unpinned", "is not pinned any more")


def pinned_span(node: Node) -> Span | None:
    """The layers (first, last) that a node is pinned to; None: not pinned to layers."""
    if node.pin in ("", PINNED_OUT):
        return None
    first, _, last = node.pin.partition("-")
    return int(first), int(last)


def pinned_spans(state: State, peers: tuple[str, ...]) -> dict[str, Span]:
    """Pinned layers of these peers, by name."""
    spans = ((state.nodes[peer].name, pinned_span(state.nodes[peer])) for peer in peers)
    return {name: span for name, span in spans if span is not None}


def _put(state: State, now: StepTime, node: Node, pinned: Node, kind: str, change: str) -> Step[Node]:
    draft = Draft(state, now)
    if pinned != node:
        draft.put(pinned)
        draft.event(kind, node.run_id, node.peer_id, f"{node.name} {change}")
    return draft.done(pinned)


def _check_span(state: State, node: Node, span: Span) -> None:
    first, last = span
    model = span_memory_of(state, node.run_id)
    if not 0 <= first <= last or (model is not None and last >= model.layers):
        numbers = f"0 to {model.layers - 1}" if model is not None else "from 0"
        raise PlanInputInvalid(
            f"layers {first}–{last} do not exist: layers are numbered {numbers}, the first at most the last"
        )
    live = state.live.get(node.peer_id)
    if model is not None and live is not None and not model.fits(live.profile, first, last):
        raise PlanInputInvalid(
            f"layers {first}–{last} need {bytes_text(model.needed_bytes(live.profile, first, last))}, "
            f"and {node.name} has {bytes_text(live.profile.device_memory_bytes)}",
            "pin it to fewer layers, or ask its owner to lend more memory",
        )


def _check_together(state: State, pinned: Node) -> None:
    """Raise `PlanInputInvalid` if with this pin no enrolled node may hold some layer."""
    nodes = [pinned if node.peer_id == pinned.peer_id else node for node in state.members_of(pinned.run_id)]
    nodes = [node for node in nodes if should_train(node)]
    if any(not node.pin for node in nodes):
        return
    gap = _first_gap(
        sorted(span for span in map(pinned_span, nodes) if span is not None), state.runs[pinned.run_id].layers
    )
    if gap is not None:
        raise PlanInputInvalid(
            f"with this pin all nodes are pinned, and none of them may hold layer {gap}",
            "unpin a node: `atollctl plan unpin`",
        )


def _first_gap(spans: list[Span], table: bytes) -> int | None:
    """First layer that none of these ordered spans holds. Before genesis the number of layers is unknown."""
    layers, held = len(plan_pb2.LayerTable.FromString(table).layers), 0
    for first, last in spans:
        held = max(held, last + 1) if first <= held else held
    needed = layers or max((last + 1 for _, last in spans), default=1)
    return held if held < needed else None
