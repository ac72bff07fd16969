"""Requirements of a run for a node.

The coordinator sends them for a join token that is not used up yet, or to a member.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from atoll.core.errors import InvalidTransition, PeerMisbehaved
from atoll.core.identity import fingerprint
from atoll.core.membership import ROLE_NAMES
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.v1 import enrolment_pb2, plan_pb2
from atoll.v1 import membership_pb2 as mb

MAX_LAYERS = 1024  # in a layer table; the planner's limit
_DIGEST = re.compile(r"|[0-9a-f]{64}")


@dataclass(frozen=True)
class RunNeeds:
    """A run's facts that a node knows before it trains."""

    run_id: str
    spec_toml: str = field(repr=False)
    spec: RunSpec = field(repr=False)
    roles: frozenset[str]
    coordinator: str  # host:port
    operator: str  # hex SHA-256 of the operator's key
    state: mb.RunState = mb.RUN_STATE_UNSPECIFIED
    layers: plan_pb2.LayerTable | None = field(default=None, repr=False)  # set once genesis is written
    corpus_digest: str = ""  # hex; empty if it is not decided or not known
    head_round: int = 0

    @property
    def trains(self) -> bool:
        """Whether this node trains: a seed does not."""
        return "seed" not in self.roles

    @classmethod
    def from_preview(cls, response: enrolment_pb2.PreviewResponse, coordinator: str) -> RunNeeds:
        """Check a coordinator's answer. Raises `RunSpecError`, `PeerMisbehaved`, and `InvalidTransition` for a run
        that its operator stopped.
        """
        if response.run_state == mb.RUN_STATE_STOPPED:
            raise InvalidTransition(
                f"the operator stopped the run {response.run_id}", "ask your operator for a token of another run"
            )
        return cls(
            run_id=response.run_id,
            spec_toml=response.run_spec_toml,
            spec=parse_run_spec(response.run_spec_toml, f"the spec of run {response.run_id}"),
            roles=frozenset(ROLE_NAMES[role] for role in response.roles if role in ROLE_NAMES),
            coordinator=coordinator,
            operator=fingerprint(response.operator_public_key),
            state=response.run_state,
            layers=checked_layers(response.layers) if response.HasField("layers") else None,
            corpus_digest=checked_digest(response.corpus_digest),
            head_round=response.head_round,
        )


def checked_layers(table: plan_pb2.LayerTable) -> plan_pb2.LayerTable:
    """Return the table. Raises `PeerMisbehaved` if it is too long or contradicts itself."""
    names = {layer.name for layer in table.layers}
    known = all(names.issuperset(layer.tied_to) for layer in table.layers)
    if not 1 <= len(table.layers) <= MAX_LAYERS or len(names) != len(table.layers) or not known:
        raise PeerMisbehaved("the coordinator sent a layer table that contradicts itself")
    return table


def checked_digest(digest: str) -> str:
    """Return the digest of a corpus. Raises `PeerMisbehaved` if it is not a valid digest."""
    if not _DIGEST.fullmatch(digest):
        raise PeerMisbehaved("the coordinator sent a digest of the corpus that is none")
    return digest
