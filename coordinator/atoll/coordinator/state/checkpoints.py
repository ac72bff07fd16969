"""Which node holds which checkpoint, as the nodes tell it. Pure.

The files stay where they are. Here is what `atollctl checkpoint list` shows, and who is asked when the operator pulls
one: a connected node that says it holds it. What a node says it holds is a claim; offered is what is known to have
committed, unless the operator asks for anything.
"""

from __future__ import annotations

from atoll.coordinator.state import find
from atoll.coordinator.state.records import Checkpoint, Node
from atoll.coordinator.state.snapshot import Draft, State, electorate_after
from atoll.core.errors import InvalidRequest, NotFound, PeerMisbehaved, Unreachable
from atoll.core.manifest import parse_head, require_quorum, verify_votes
from atoll.v1 import manifest_pb2, plan_pb2
from atoll.v1 import membership_pb2 as mb

MAX_CHECKPOINTS = 64  # of one node; the newest ones are kept
_MAX = 2**62  # databases keep 63 bits
_DIGEST_BYTES = 32
_LOOK = "see `atollctl checkpoint list`"
_ANOTHER = "name another --node"


def take(draft: Draft, node: Node, request: mb.HeartbeatRequest) -> None:
    """Replace what was known of a node's checkpoints, if it says that they changed. Raises `InvalidRequest`."""
    if not request.checkpoints_changed:
        return
    count = layer_count(draft.state, node.run_id)
    told = sorted(request.checkpoints, key=lambda item: -item.round)[:MAX_CHECKPOINTS]
    if len({item.round for item in told}) != len(told):
        raise InvalidRequest("a node tells its checkpoints, each of another round")
    for item in told:
        numbers = (item.round, item.bytes, item.committed_tokens, abs(item.written_unix_ms))
        if item.layers.first > item.layers.last or (count and item.layers.last >= count):
            raise InvalidRequest("a checkpoint holds layers that cannot be")
        if max(numbers) > _MAX or len(item.manifest_hash) != _DIGEST_BYTES:
            raise InvalidRequest("a checkpoint has a number or a hash that cannot be")
    held = tuple(
        Checkpoint(
            peer_id=node.peer_id,
            round=item.round,
            run_id=node.run_id,
            manifest_hash=item.manifest_hash,
            size_bytes=item.bytes,
            written_ms=item.written_unix_ms,
            committed_tokens=item.committed_tokens,
            first_layer=item.layers.first,
            last_layer=item.layers.last if item.HasField("layers") else max(0, count - 1),
        )
        for item in told
    )
    if held != draft.state.checkpoints.get(node.peer_id, ()):
        draft.set_checkpoints(node.peer_id, held)


def held_in(state: State, run_id: str) -> list[Checkpoint]:
    """All of a run, the newest first, by node name then."""
    found = [item for held in state.checkpoints.values() for item in held if item.run_id == run_id]
    return sorted(found, key=lambda item: (-item.round, state.nodes[item.peer_id].name))


def is_committed(state: State, item: Checkpoint) -> bool:
    """Whether that round is known to have committed with that manifest."""
    commit = state.memory[item.run_id].committed.get(item.round)
    return commit is not None and commit.manifest_hash == item.manifest_hash


def is_whole(state: State, item: Checkpoint) -> bool:
    """Whether it holds all layers of the run's model."""
    return item.layers == range(layer_count(state, item.run_id))


def layer_count(state: State, run_id: str) -> int:
    """Of the run's model; 0 before genesis."""
    return len(plan_pb2.LayerTable.FromString(state.runs[run_id].layers).layers)


def choose(state: State, run_id: str, round_number: int, node: str, *, unverified: bool = False) -> Checkpoint:
    """The one to pull: of that round (0: the newest) and node (empty: any), from a connected node.

    `unverified`: also rounds that are not known to have committed, as between a backup and its restore.
    Raises `NotFound`, `Ambiguous`, and `Unreachable` when only nodes that are away hold it.
    """
    run = find.run(state, run_id)
    peer_id = find.node(state, node).peer_id if node else ""
    wanted = [
        item for item in held_in(state, run.run_id) if round_number in (0, item.round) and peer_id in ("", item.peer_id)
    ]
    which = f"of round {round_number} " if round_number else ""
    known = [item for item in wanted if unverified or is_committed(state, item)]
    if wanted and not known:
        raise NotFound(
            f"nodes say that they hold a checkpoint {which}that is not known to have committed",
            "tell it from a forged one yourself, by several nodes that hold it, and add --unverified",
        )
    wanted = known
    if not wanted:
        raise NotFound(f"no node of run {run.run_id!r} said that it holds a checkpoint {which}there", _LOOK)
    parts = [item for item in wanted if not is_whole(state, item)]
    wanted = [item for item in wanted if item not in parts]
    if not wanted:
        names = ", ".join(
            f"{state.nodes[item.peer_id].name} {item.first_layer}-{item.last_layer}" for item in parts[:8]
        )
        raise NotFound(
            f"no node holds a checkpoint {which}of all layers there; some hold parts: {names}",
            "put them together where they lie: `atoll export --checkpoint DIR --checkpoint DIR`",
        )
    here = [item for item in wanted if connected(state, item.peer_id)]
    if not here:
        names = ", ".join(state.nodes[item.peer_id].name for item in wanted[:5])
        raise Unreachable(f"the nodes that hold a checkpoint {which}are not connected: {names}", _LOOK)
    return here[0]


def check_manifest(
    state: State, wanted: Checkpoint, committed: manifest_pb2.CommittedManifest, *, unverified: bool = False
) -> None:
    """Raise `PeerMisbehaved` or `SignatureInvalid` unless it is the manifest asked for, with the votes that count.

    `unverified`: a round that is not known here may pass with whatever votes; they must only be genuine, which the
    operator's side checks (`cli/pulled.py`).
    """
    head = parse_head(committed, wanted.run_id)
    name, memory = state.nodes[wanted.peer_id].name, state.memory[wanted.run_id]
    if head.hash != wanted.manifest_hash or head.round != wanted.round:
        raise PeerMisbehaved(f"{name} sent another manifest than the one that it said it holds", _ANOTHER)
    if not is_committed(state, wanted):
        if not unverified:
            raise PeerMisbehaved(f"round {wanted.round} of {name} is not known to have committed", _ANOTHER)
        return
    if len(head.signers) > len(state.nodes):
        raise PeerMisbehaved(f"the manifest from {name} carries votes of strangers", _ANOTHER)
    electorate = electorate_after(memory, head.round - 1)
    if electorate is not None:
        require_quorum(head, electorate, state.operator_key)
    verify_votes(head)


def connected(state: State, peer_id: str) -> bool:
    """Whether the node can be asked now."""
    live = state.live.get(peer_id)
    return live is not None and live.connected and not state.nodes[peer_id].banned
