"""Admission of nodes: tokens, enrolment, renewal, probation, seeds. Pure.

Spending a token and writing the node's row are one step, hence one transaction. So a token with N uses admits N times,
even if processes die in between.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from atoll.coordinator.rounds import training_scores
from atoll.coordinator.state import lookup
from atoll.coordinator.state.draft import Draft, Step, charge_row
from atoll.coordinator.state.snapshot import State, StepTime
from atoll.coordinator.store.records import Node, Token
from atoll.core.errors import AlreadyExists, InvalidRequest, TokenExpired, TokenRevoked, TokenUnknown, TokenUsedUp
from atoll.core.tokens import secret_matches
from atoll.core.units import duration_text

TOKEN_ROLES = ("node", "seed")
MAX_USES = 100_000
MAX_TTL_SECONDS = 366 * 24 * 3600
_NAME = re.compile(r"[a-z0-9-]{1,63}")
_ASK_OPERATOR = "ask your operator for a new one: `atollctl token create`"


@dataclass(frozen=True)
class TokenRequest:
    """The operator's request for a token. The caller drew id and secret."""

    token_id: str
    secret_hash: str
    run_id: str  # empty: the only run
    uses: int
    ttl_seconds: int
    roles: tuple[str, ...]
    on_probation: bool = False


@dataclass(frozen=True)
class Applicant:
    """A node that presents a token. The caller has verified the key behind `peer_id`."""

    token_id: str
    secret: str = field(repr=False)
    peer_id: str
    public_key: bytes
    node_name: str
    authority: str = ""  # that issues its certificate


def create_token(state: State, now: StepTime, request: TokenRequest) -> Step[Token]:
    """Create a token. Raises `NotFound`, `Ambiguous`, `InvalidRequest`."""
    run = lookup.run(state, request.run_id)
    roles = request.roles or ("node",)
    if any(role not in TOKEN_ROLES for role in roles):
        raise InvalidRequest(f"roles are {', '.join(roles)}; a token can admit {' and '.join(TOKEN_ROLES)}")
    if not 1 <= request.uses <= MAX_USES:
        raise InvalidRequest(f"uses is {request.uses}; must be 1 to {MAX_USES}")
    if not 1 <= request.ttl_seconds <= MAX_TTL_SECONDS:
        raise InvalidRequest(f"ttl_seconds is {request.ttl_seconds}; must be 1 to {MAX_TTL_SECONDS}")
    token = Token(
        token_id=request.token_id,
        secret_hash=request.secret_hash,
        run_id=run.run_id,
        roles=tuple(sorted(set(roles))),
        uses_total=request.uses,
        uses_left=request.uses,
        created_ms=now.unix_ms,
        expires_ms=now.unix_ms + request.ttl_seconds * 1000,
        on_probation=request.on_probation,
    )
    draft = Draft(state, now)
    draft.put(token)
    uses = "one use" if token.uses_total == 1 else f"{token.uses_total} uses"
    uses += ", on probation" if token.on_probation else ""
    draft.event("token.created", run.run_id, token.token_id, f"token for {', '.join(token.roles)}, {uses}")
    return draft.done(token)


def revoke_token(state: State, now: StepTime, token_id: str) -> Step[Token]:
    """Revoke a token; does nothing if it is revoked already. Raises `NotFound`."""
    token = lookup.token(state, token_id)
    draft = Draft(state, now)
    if not token.revoked:
        token = replace(token, revoked=True)
        draft.put(token)
        draft.event("token.revoked", token.run_id, token.token_id, "token revoked")
    return draft.done(token)


def enrol(state: State, now: StepTime, applicant: Applicant) -> Step[Node]:
    """Spend one use of the token and write the node's row. Raises `Rejected` and its subclasses, `AlreadyExists`.

    If this token admitted the peer before, the answer is the same and no use is spent, because the first answer may
    have been lost.
    """
    token = check_applicant(state, now, applicant)
    known, live = state.nodes.get(applicant.peer_id), state.live.get(applicant.peer_id)
    repeated = _admitted_before(state, applicant)
    node = _enrolled(state, now, known, token, applicant)
    draft = Draft(state, now)
    draft.put(node)
    draft.drop_traces(frozenset(), {node.peer_id} & state.forgotten.keys())
    if not repeated:
        token = replace(token, uses_left=token.uses_left - 1)
        draft.put(token)
        _log_enrolled(draft, node, again=known is not None)
        if token.uses_left == 0:
            draft.event("token.used-up", token.run_id, token.token_id, "the token has no uses left")
    elif known is not None and live is not None and known.name != node.name and charge_row(draft, node.peer_id):
        _log_enrolled(draft, node, again=True)
    return draft.done(node)


def check_applicant(state: State, now: StepTime, applicant: Applicant) -> Token:
    """The token, if it admits the applicant. Raises the errors of `enrol`."""
    if not _NAME.fullmatch(applicant.node_name):
        raise InvalidRequest("a node's name must have 1 to 63 characters of a-z, 0-9 and -", "join with another --name")
    token = _check_token(state, now, applicant, spent=_admitted_before(state, applicant))
    lookup.refuse_denied(state, applicant.peer_id)
    known, live = state.nodes.get(applicant.peer_id), state.live.get(applicant.peer_id)
    elsewhere = known and known.run_id != token.run_id and not _admitted_before(state, applicant)
    if known and elsewhere and live and live.connected:
        raise AlreadyExists(
            f"peer {applicant.peer_id} is connected to run {known.run_id!r}",
            "stop it first, or use another data directory: one identity serves one run",
        )
    return token


def _admitted_before(state: State, applicant: Applicant) -> bool:
    """Whether this token admitted this peer already."""
    known = state.nodes.get(applicant.peer_id)
    return known is not None and known.token_id == applicant.token_id


def _enrolled(state: State, now: StepTime, known: Node | None, token: Token, applicant: Applicant) -> Node:
    """The row of an admitted node. Within one run the node keeps its pin and its availability record.

    A draining node that presents a new token stops draining. A token does not change a known node's probation. If the
    operator moved the node since the token admitted it, the token admits it to the run where it is now.
    """
    repeated = known is not None and known.token_id == token.token_id
    run_id = known.run_id if known is not None and repeated else token.run_id
    name = unique_name(state, run_id, applicant.peer_id, applicant.node_name)
    if known is not None and known.run_id == run_id:
        admitted = replace(known, name=name, roles=token.roles, enrolled_ms=now.unix_ms, token_id=token.token_id)
        admitted = replace(admitted, authority=applicant.authority)
        if not repeated:
            admitted = replace(admitted, draining=False, assigned_run="", rotations=0)
        return replace(admitted, epoch=known.epoch + 1, left=False, ended="", ended_detail="")
    last_epoch = state.forgotten[applicant.peer_id].epoch if applicant.peer_id in state.forgotten else 0
    return Node(
        peer_id=applicant.peer_id,
        name=name,
        run_id=token.run_id,
        roles=token.roles,
        public_key=applicant.public_key,
        epoch=known.epoch + 1 if known else last_epoch + 1,
        enrolled_ms=now.unix_ms,
        last_seen_ms=known.last_seen_ms if known else 0,
        token_id=token.token_id,
        on_probation=token.on_probation,
        authority=applicant.authority,
    )


def _log_enrolled(draft: Draft, node: Node, *, again: bool) -> None:
    message = f"{node.name} enrolled{' again' if again else ''} as {', '.join(node.roles)}"
    draft.event("node.enrolled", node.run_id, node.peer_id, message)
    if "seed" not in node.roles:
        tell_if_no_seed(draft, node.run_id)


def tell_if_no_seed(draft: Draft, run_id: str) -> None:
    """Log an event if nodes of a run cannot discover each other because it has no seed."""
    if not _seeds(draft.state, run_id):
        message = "this run has no seed: nodes cannot discover each other. Start one: `atoll join --name seed`"
        draft.event("run.no-seed", run_id, run_id, message)


def renew(state: State, now: StepTime, peer_id: str) -> Step[Node]:
    """Give a member its next membership epoch. Raises `Banned`, `CertificateInvalid`."""
    node = lookup.member(state, peer_id)
    draft = Draft(state, now)
    node = replace(node, epoch=node.epoch + 1)
    draft.put(node)
    return draft.done(node)


def set_probation(state: State, now: StepTime, text: str, *, on_probation: bool) -> Step[Node]:
    """Vouch for a node, or put it on probation. Its audits start again. Raises `NotFound`, `Ambiguous`."""
    node = lookup.node(state, text)
    draft = Draft(state, now)
    if node.on_probation != on_probation:
        node = replace(node, on_probation=on_probation)
        draft.put(node)
        kind, message = "node.vouched-for", f"the operator vouches for {node.name}"
        if on_probation:
            kind, message = "node.on-probation", f"the operator put {node.name} on probation"
        training_scores.forget(draft, node)
        draft.event(kind, node.run_id, node.peer_id, message)
    return draft.done(node)


def seeds_of(state: State, run_id: str) -> tuple[str, ...]:
    """Multiaddrs of the run's seeds, connected seeds first. Each address ends in its seed's peer id."""

    def connected_first(node: Node) -> tuple[bool, str]:
        live = state.live.get(node.peer_id)
        return (live is None or not live.connected, node.peer_id)

    return tuple(
        address if address.endswith(f"/p2p/{node.peer_id}") else f"{address}/p2p/{node.peer_id}"
        for node in sorted(_seeds(state, run_id), key=connected_first)
        for address in node.multiaddrs
    )


def _seeds(state: State, run_id: str) -> list[Node]:
    members = state.members_of(run_id)
    return [node for node in members if "seed" in node.roles and not (node.banned or node.left)]


def _check_token(state: State, now: StepTime, applicant: Applicant, *, spent: bool) -> Token:
    """The token, if it admits the applicant. `spent`: it admitted the applicant before, so no use need be left."""
    token = state.tokens.get(applicant.token_id)
    if token is None or not secret_matches(applicant.secret, token.secret_hash):
        raise TokenUnknown(
            "this coordinator does not know the token, or its secret is wrong", "copy the whole token again"
        )
    if token.revoked:
        raise TokenRevoked("the operator revoked this token", _ASK_OPERATOR)
    if token.expires_ms <= now.unix_ms:
        ago = duration_text((now.unix_ms - token.expires_ms) / 1000)
        raise TokenExpired(f"the token expired {ago} ago", _ASK_OPERATOR)
    if token.uses_left <= 0 and not spent:
        raise TokenUsedUp(f"the token has no uses left: it had {token.uses_total}", _ASK_OPERATOR)
    return token


def unique_name(state: State, run_id: str, peer_id: str, wanted: str) -> str:
    """The wanted name, with a number added if another peer of the run or of its plan has that name."""
    plan = state.memory[run_id].plan
    peers = {*(node.peer_id for node in state.members_of(run_id)), *(plan.members if plan else ())}
    others = (state.nodes[peer] for peer in peers - {peer_id} if peer in state.nodes)
    taken = {node.name for node in others if not node.replaced_by}
    name, number = wanted, 2
    while name in taken:
        name = f"{wanted[:58]}-{number}"
        number += 1
    return name
