"""Bans: the deny-list of peers that every member refuses. Pure."""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.sanitize import MAX_REASON_CHARACTERS, clean
from atoll.coordinator.state import lookup
from atoll.coordinator.state.draft import Draft, Step
from atoll.coordinator.state.snapshot import State, StepTime
from atoll.coordinator.store.records import ForgottenNode, Node
from atoll.core.errors import InvalidTransition
from atoll.core.membership import DenyList, MembershipVerifier
from atoll.v1 import common_pb2 as pb


def ban(state: State, now: StepTime, text: str, reason: str) -> Step[Node | ForgottenNode]:
    """Put a peer on the deny-list until `unban`. A forgotten node is named by peer id.

    Raises `NotFound`, `Ambiguous`.
    """
    known = lookup.known(state, text) or lookup.node(state, text)
    draft = Draft(state, now)
    ban_known(draft, known, clean(reason, MAX_REASON_CHARACTERS))
    return draft.done(draft.state.nodes.get(known.peer_id, known))


def ban_known(draft: Draft, known: Node | ForgottenNode, reason: str) -> None:
    """Put a node that `lookup.known` returned on the deny-list, unless it is there.

    `known` is the node's newest identity, so a node cannot escape a ban by a new identity.
    """
    state = draft.state
    if isinstance(known, Node):
        if known.banned:
            return
        draft.put(replace(known, banned=True))
    elif known.peer_id in state.deny.peer_ids:
        return
    change_deny_list(draft, state.deny.peer_ids | {known.peer_id})
    run_id = known.run_id if known.run_id in state.runs else ""
    draft.event("node.banned", run_id, known.peer_id, f"{known.name} was banned{f': {reason}' if reason else ''}")


def unban(state: State, now: StepTime, text: str) -> Step[Node | None]:
    """Take a peer off the deny-list; None if its row is gone.

    Raises `NotFound`, `Ambiguous`, and `InvalidTransition` for an earlier identity of a forgotten node.
    """
    draft = Draft(state, now)
    if text in state.deny.peer_ids - state.nodes.keys():  # its node was forgotten, or is missing after a restore
        _refuse_replaced(state, text)
        change_deny_list(draft, state.deny.peer_ids - {text})
        draft.event("node.unbanned", "", text, f"{text} is not banned any more")
        return draft.done(None)
    node = lookup.node(state, text)
    if node.banned:
        draft.put(replace(node, banned=False))
        change_deny_list(draft, state.deny.peer_ids - {node.peer_id})
        draft.event("node.unbanned", node.run_id, node.peer_id, f"{node.name} is not banned any more")
    return draft.done(draft.state.nodes[node.peer_id])


def _refuse_replaced(state: State, peer_id: str) -> None:
    trace, known = state.forgotten.get(peer_id), lookup.known(state, peer_id)
    if trace is not None and trace.replaced_by:
        newest = known.peer_id if known is not None else trace.replaced_by
        raise InvalidTransition(
            f"{peer_id} is an identity that {trace.name} had earlier: it stays refused",
            f"if its newest one is banned, take that back: atollctl node unban {newest}",
        )


def change_deny_list(draft: Draft, peer_ids: frozenset[str]) -> None:
    """Issue a deny-list of these peers."""
    number = max(draft.state.deny.number, draft.state.deny_reserved) + 1
    draft.issue_deny(DenyList(number, peer_ids))


def merge_deny_list(draft: Draft, signed: pb.Signed) -> None:
    """Adopt a newer deny-list that a member sends: this coordinator was restored from an older backup.

    Raises `SignatureInvalid`, `CertificateInvalid` for a list that this operator did not sign.
    """
    shown = MembershipVerifier(draft.state.operator_key, "").verify_deny_list(signed)
    known = draft.state.deny
    if shown.number <= known.number:
        return
    number = max(shown.number, draft.state.deny_reserved) + 1
    draft.issue_deny(DenyList(number, known.peer_ids | shown.peer_ids))  # unbans since the backup are unknown
    for peer_id in sorted(shown.peer_ids - known.peer_ids):
        node = draft.state.nodes.get(peer_id)
        if node is not None:
            draft.put(replace(node, banned=True))
        name = node.name if node else peer_id
        draft.event("node.banned", node.run_id if node else "", peer_id, f"{name} was banned before the restore")
