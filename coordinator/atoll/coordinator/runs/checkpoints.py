"""Record of the checkpoints that nodes report, and the choice of nodes for a download. Pure.

The files stay on the nodes. `atollctl checkpoint list` shows this record. A pull asks connected nodes that report
the round: as few as together hold all layers. A report is a claim, so only rounds that are known to have committed
are offered, unless the operator passes --unverified.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.coordinator.rounds.round_checks import layer_count
from atoll.coordinator.state import lookup
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.run_memory import electorate_after
from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import MAX_INTEGER, SHA256_BYTES, Checkpoint, Node
from atoll.core.errors import AtollError, InvalidRequest, NotFound, PeerMisbehaved, Unreachable
from atoll.core.manifest import parse_head, require_quorum, verify_votes
from atoll.core.units import layers_text
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

MAX_CHECKPOINTS = 64  # of one node; only the newest are recorded
MAX_REPORTED_CHECKPOINTS = 4096  # accepted in one message
_LOOK = "see `atollctl checkpoint list`"
_ANOTHER = "name another --node"


def update_from_heartbeat(draft: Draft, node: Node, request: mb.HeartbeatRequest) -> None:
    """Replace the record of a node's checkpoints, if the request says that they changed. Raises `InvalidRequest`."""
    if not request.checkpoints_changed:
        return
    count = layer_count(draft.state.runs[node.run_id].layers)
    reported = sorted(request.checkpoints, key=lambda item: -item.round)[:MAX_CHECKPOINTS]
    if len({item.round for item in reported}) != len(reported):
        raise InvalidRequest("a heartbeat reports two checkpoints of one round")
    held = tuple(checked_row(node.peer_id, node.run_id, item, count) for item in reported)
    if held != draft.state.checkpoints.get(node.peer_id, ()):
        draft.set_checkpoints(node.peer_id, held)


def _check_reported(item: mb.CheckpointInfo, count: int) -> None:
    numbers = (item.round, item.bytes, item.committed_tokens, abs(item.written_unix_ms))
    if item.layers.first > item.layers.last or (count and item.layers.last >= count):
        spans = f"layers {item.layers.first}-{item.layers.last}; the model has {count} layers"
        raise InvalidRequest(f"the checkpoint of round {item.round} has {spans}")
    if max(numbers) > MAX_INTEGER:
        raise InvalidRequest(f"the checkpoint of round {item.round} has a number above {MAX_INTEGER}")
    if (length := len(item.manifest_hash)) != SHA256_BYTES:
        raise InvalidRequest(f"manifest_hash has {length} bytes; must be {SHA256_BYTES}")


def checked_row(peer_id: str, run_id: str, item: mb.CheckpointInfo, count: int) -> Checkpoint:
    """The row of a reported checkpoint of a model of `count` layers (0: not known). Raises `InvalidRequest`."""
    _check_reported(item, count)
    return Checkpoint(
        peer_id=peer_id,
        round=item.round,
        run_id=run_id,
        manifest_hash=item.manifest_hash,
        size_bytes=item.bytes,
        written_ms=item.written_unix_ms,
        committed_tokens=item.committed_tokens,
        first_layer=item.layers.first,
        last_layer=item.layers.last if item.HasField("layers") else max(0, count - 1),
    )


def checkpoints_of_run(state: State, run_id: str) -> list[Checkpoint]:
    """All checkpoints of a run, by round (newest first) and node name."""
    found = [item for held in state.checkpoints.values() for item in held if item.run_id == run_id]
    return sorted(found, key=lambda item: (-item.round, state.nodes[item.peer_id].name))


def is_committed(state: State, item: Checkpoint) -> bool:
    """True if the coordinator knows that this round committed with this manifest."""
    commit = state.memory[item.run_id].committed.get(item.round)
    return commit is not None and commit.manifest_hash == item.manifest_hash


def choose_for_pull(
    state: State, run_id: str, round_number: int, node: str, *, unverified: bool = False
) -> tuple[Checkpoint, ...]:
    """Checkpoints to pull that together have all layers of one round (0: the newest), in layer order.

    Only connected nodes are chosen; `node` (empty: any) restricts the choice to one. `unverified` also allows rounds
    that are not known to have committed, such as rounds between a backup and its restore. Raises `NotFound`,
    `Ambiguous`, and `Unreachable` if needed nodes are not connected.
    """
    run = lookup.run(state, run_id)
    peer_id = lookup.node(state, node).peer_id if node else ""
    reported = [
        item
        for item in checkpoints_of_run(state, run.run_id)
        if round_number in (0, item.round) and peer_id in ("", item.peer_id)
    ]
    which = f"of round {round_number} " if round_number else ""
    known = [item for item in reported if unverified or is_committed(state, item)]
    if reported and not known:
        raise NotFound(
            f"nodes report a checkpoint {which}that is not known to have committed",
            "check that several nodes hold the same one, then add --unverified: it could be forged",
        )
    if not known:
        raise NotFound(f"no node of run {run.run_id!r} reports a checkpoint {which}".rstrip(), _LOOK)
    count = layer_count(run.layers)
    states: dict[tuple[int, bytes], list[Checkpoint]] = {}
    for item in known:
        states.setdefault((item.round, item.manifest_hash), []).append(item)
    for held in states.values():
        if found := fewest_covering([item for item in held if connected(state, item.peer_id)], count):
            return found
    raise _no_checkpoint_error(state, list(states.values()), count)


def fewest_covering(held: Sequence[Checkpoint], count: int) -> tuple[Checkpoint, ...]:
    """As few checkpoints as cover all `count` layers, in layer order; empty if layers are missing."""
    chosen: list[Checkpoint] = []
    reached = 0
    while reached < count:
        candidates = [item for item in held if reached in item.layers]
        if not candidates:
            return ()
        chosen.append(max(candidates, key=lambda item: item.last_layer))
        reached = chosen[-1].last_layer + 1
    return tuple(chosen)


def _no_checkpoint_error(state: State, states: Sequence[Sequence[Checkpoint]], count: int) -> AtollError:
    """Error for the round that lacks the fewest layers, and of several such rounds for the newest."""
    for held in states:
        if any(not connected(state, item.peer_id) for item in fewest_covering(held, count)):
            away = sorted({state.nodes[item.peer_id].name for item in held if not connected(state, item.peer_id)})
            names = ", ".join(away[:5])
            return Unreachable(f"nodes that hold layers of round {held[0].round} are not connected: {names}", _LOOK)
    missing, held = min(
        ((set(range(count)).difference(*(item.layers for item in held)), held) for held in states),
        key=lambda pair: len(pair[0]),
    )
    names = ", ".join(f"{state.nodes[item.peer_id].name} {item.first_layer}-{item.last_layer}" for item in held[:8])
    return NotFound(
        f"no node holds a checkpoint of {layers_text(missing)} of round {held[0].round}; there are: {names}",
        "wait for the next checkpoints, or name another --round or --node: see `atollctl checkpoint list`",
    )


def check_manifest(
    state: State, wanted: Checkpoint, committed: manifest_pb2.CommittedManifest, *, unverified: bool = False
) -> None:
    """Raise `PeerMisbehaved` or `SignatureInvalid` unless this is the requested manifest with a quorum of votes.

    `unverified`: a round unknown to the coordinator passes with any votes. `atollctl` then only checks that their
    signatures are valid (`cli/checkpoint_download.py`).
    """
    head = parse_head(committed, wanted.run_id)
    name, memory = state.nodes[wanted.peer_id].name, state.memory[wanted.run_id]
    if head.hash != wanted.manifest_hash or head.round != wanted.round:
        raise PeerMisbehaved(f"{name} sent another manifest than it reported", _ANOTHER)
    if not is_committed(state, wanted):
        if not unverified:
            raise PeerMisbehaved(f"round {wanted.round} of {name} is not known to have committed", _ANOTHER)
        return
    if len(head.signers) > len(state.nodes):
        raise PeerMisbehaved(
            f"the manifest from {name} has {len(head.signers)} votes; {len(state.nodes)} nodes are known", _ANOTHER
        )
    electorate = electorate_after(memory, head.round - 1)
    if electorate is not None:
        require_quorum(head, electorate, state.operator_key)
    verify_votes(head)


def connected(state: State, peer_id: str) -> bool:
    """True if the node is connected and not banned."""
    live = state.live.get(peer_id)
    node = state.nodes.get(peer_id)
    return live is not None and live.connected and node is not None and not node.banned
