"""Find a run, a node or a token by what a person typed, or say in one sentence why not."""

from __future__ import annotations

from atoll.coordinator.state.run_states import TRANSITIONS
from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import Node, Run, Token
from atoll.core.errors import Ambiguous, CertificateInvalid, NotFound


def run(state: State, run_id: str) -> Run:
    """By name; an empty name means the only run, or the only one that is not over. Raises `NotFound`, `Ambiguous`."""
    if run_id:
        found = state.runs.get(run_id)
        if found is None:
            raise NotFound(f"there is no run called {run_id!r}", "see `atollctl run list`")
        return found
    if not state.runs:
        raise NotFound("there is no run yet", "create one: `atollctl run create FILE`")
    meant = [found for found in state.runs.values() if TRANSITIONS[found.state]] or list(state.runs.values())
    if len(meant) > 1:
        names = sorted(found.run_id for found in meant)
        which = f"say which: --run {names[0]}; commands of `run` take the name alone"
        raise Ambiguous(f"there are {len(names)} runs: {', '.join(names)}", which)
    return meant[0]


def node(state: State, text: str) -> Node:
    """By peer id, node name, or unique prefix or suffix of a peer id. Raises `NotFound`, `Ambiguous`."""
    if text in state.nodes:
        return state.nodes[text]
    named = [item for item in state.nodes.values() if item.name == text]
    found = named or [item for item in state.nodes.values() if text and _part_of(text, item.peer_id)]
    if not found:
        raise NotFound(f"there is no node {text!r}", "see `atollctl node list`")
    if len(found) > 1:
        peers = ", ".join(sorted(item.peer_id for item in found))
        raise Ambiguous(f"{text!r} names {len(found)} nodes: {peers}", "give the end of its peer id, or all of it")
    return found[0]


def token(state: State, token_id: str) -> Token:
    """By id. Raises `NotFound`."""
    found = state.tokens.get(token_id)
    if found is None:
        raise NotFound(f"there is no token with the id {token_id!r}", "see `atollctl token list`")
    return found


def caller(state: State, peer_id: str) -> Node:
    """The row of a peer that showed a certificate of ours. Raises `CertificateInvalid`."""
    found = state.nodes.get(peer_id)
    if found is None:
        raise CertificateInvalid(f"peer {peer_id} is not enrolled here", "join again with a new token")
    return found


def _part_of(text: str, peer_id: str) -> bool:
    """Ed25519 peer ids all begin alike, so the end of one is what people can tell apart."""
    return len(text) >= 4 and (peer_id.startswith(text) or peer_id.endswith(text))
