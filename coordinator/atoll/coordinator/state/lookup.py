"""Lookup of runs, nodes and tokens by a name or id that a person typed; errors list the candidates."""

from __future__ import annotations

from atoll.coordinator.state.run_states import TRANSITIONS
from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import ForgottenNode, Node, Run, Token
from atoll.core.errors import Ambiguous, Banned, CertificateInvalid, Forgotten, IdentityReplaced, NotFound


def run(state: State, run_id: str) -> Run:
    """Find a run by name; an empty name means the only (unfinished) run. Raises `NotFound`, `Ambiguous`."""
    if run_id:
        found = state.runs.get(run_id)
        if found is None:
            what = f"run {run_id!r} was deleted" if run_id in state.deleted_runs else f"no run is named {run_id!r}"
            raise NotFound(what, "see `atollctl run list`")
        return found
    if not state.runs:
        raise NotFound("no run exists yet", "create one: `atollctl run create FILE`")
    candidates = [found for found in state.runs.values() if TRANSITIONS[found.state]] or list(state.runs.values())
    if len(candidates) > 1:
        names = sorted(found.run_id for found in candidates)
        remedy = f"name one with --run {names[0]}; commands of `atollctl run` take the name as argument"
        raise Ambiguous(f"there are {len(names)} runs: {', '.join(names)}", remedy)
    return candidates[0]


def node(state: State, text: str) -> Node:
    """Find a node by peer id, name, or unique prefix or suffix of a peer id. Raises `NotFound`, `Ambiguous`.

    A replaced identity finds the node's newest identity.
    """
    if text in state.nodes:
        return newest(state, state.nodes[text])
    found = [item for item in state.present_nodes() if item.name == text]
    if not found and text:
        matching = (newest(state, item) for item in state.nodes.values() if _part_of(text, item.peer_id))
        found = list({item.peer_id: item for item in matching}.values())
    if not found:
        raise NotFound(f"no node has the name or peer id {text!r}", "see `atollctl node list`")
    if len(found) > 1:
        peers = ", ".join(sorted(item.peer_id for item in found))
        raise Ambiguous(f"{text!r} matches {len(found)} nodes: {peers}", "give the peer id, or its last characters")
    return found[0]


def newest(state: State, found: Node) -> Node:
    """The row of a node under its newest identity."""
    while found.replaced_by:
        found = state.nodes[found.replaced_by]
    return found


def known(state: State, peer_id: str) -> Node | ForgottenNode | None:
    """The row of a peer's newest identity, or its trace if the node was forgotten."""
    while (trace := state.forgotten.get(peer_id)) is not None and trace.replaced_by:
        peer_id = trace.replaced_by
    found = state.nodes.get(peer_id)
    return newest(state, found) if found is not None else trace


def identities(state: State, found: Node) -> tuple[str, ...]:
    """All peer ids that a node had, ordered."""
    return tuple(sorted(item.peer_id for item in state.nodes.values() if newest(state, item).peer_id == found.peer_id))


def token(state: State, token_id: str) -> Token:
    """Find a token by id. Raises `NotFound`."""
    found = state.tokens.get(token_id)
    if found is None:
        raise NotFound(f"no token has the id {token_id!r}", "see `atollctl token list`")
    return found


def caller(state: State, peer_id: str) -> Node:
    """Find the node of a peer that presented a valid certificate.

    Raises `CertificateInvalid` for an unknown peer, and `Forgotten` or `Banned` if the operator removed its row.
    """
    found = state.nodes.get(peer_id)
    if found is None:
        refuse_denied(state, peer_id)
        _refuse_forgotten(state, peer_id)
        raise CertificateInvalid(f"peer {peer_id} is not enrolled at this coordinator", "join again with a new token")
    return found


def member(state: State, peer_id: str) -> Node:
    """Find the node of a peer like `caller`, but refuse peers on the deny-list.

    Raises `Banned`, `IdentityReplaced`, `Forgotten`, `CertificateInvalid`.
    """
    found = caller(state, peer_id)
    refuse_denied(state, peer_id)
    return found


def refuse_denied(state: State, peer_id: str) -> None:
    """Raise `IdentityReplaced` or `Banned` for a peer on the deny-list."""
    found = state.nodes.get(peer_id)
    if found is not None and found.replaced_by:
        raise IdentityReplaced(
            f"this node has a new identity, {found.replaced_by}; {peer_id} is refused",
            "if its owner rotated the key, finish that: atoll identity rotate. If not, somebody else has the key: tell "
            "your operator, who can ban the node, and join with a new token from another --data-dir",
        )
    if peer_id in state.deny.peer_ids or (found is not None and found.banned):
        raise Banned(
            f"the operator banned this node: peer {peer_id} is refused by all members",
            "ask your operator why, and to take it back: `atollctl node unban`",
        )


def _refuse_forgotten(state: State, peer_id: str) -> None:
    trace = state.forgotten.get(peer_id)
    if trace is None:
        return
    if trace.run_deleted:
        raise Forgotten(
            f"the operator deleted run {trace.run_id!r}, and this node's membership with it",
            "ask your operator for a token of another run, and join with it: `atoll join`",
        )
    raise Forgotten(
        f"the operator removed this node from run {trace.run_id!r}: it was gone",
        "ask your operator for a new token, and join again with it: `atoll join`",
    )


def _part_of(text: str, peer_id: str) -> bool:
    """True if `text` is a start or end of a peer id. All Ed25519 peer ids start alike, so people give the end."""
    return len(text) >= 4 and (peer_id.startswith(text) or peer_id.endswith(text))
