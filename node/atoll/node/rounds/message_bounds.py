"""Bounds on the lists in round messages, checked on receipt; and pauses for members that exceed them.

An empty entry takes two bytes on the wire and thirty times as much when it is parsed, and costs time in every loop over
the list. So each list has a bound that an honest message cannot reach. Pure.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError, Message

from atoll.core.errors import PeerMisbehaved
from atoll.core.frames import MAX_HEADER_BYTES
from atoll.node.rounds.settlement import MAX_HOLDERS
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

MAX_PARTS = MAX_HEADER_BYTES // 34  # `Settle` has a digest of each part, with two bytes before it
MAX_VERDICTS = 1 << 16  # of 256 reducers about 256 contributors
MAX_RANGES = 1 << 16  # of samples, in one list
MAX_OTHERS = 4096  # members, layers, votes, results
_LIMITS = {
    dp.Settle.DESCRIPTOR.fields_by_name["digests"]: MAX_PARTS,
    dp.Settle.DESCRIPTOR.fields_by_name["repairs"]: MAX_PARTS,
    dp.Settle.DESCRIPTOR.fields_by_name["verdicts"]: MAX_VERDICTS,
    dp.Parts.DESCRIPTOR.fields_by_name["digests"]: MAX_PARTS,
    dp.Parts.DESCRIPTOR.fields_by_name["verdicts"]: MAX_VERDICTS,
    manifest_pb2.Manifest.DESCRIPTOR.fields_by_name["verdicts"]: MAX_VERDICTS,
    manifest_pb2.DataPosition.DESCRIPTOR.fields_by_name["returned"]: MAX_RANGES,
}
_MANIFESTS = {
    kind.DESCRIPTOR.fields_by_name["payload"] for kind in (dp.Digest, dp.Proposal, manifest_pb2.CommittedManifest)
}
_INNER_LISTS = {  # lists inside the elements of a list: name, and the bound on all their entries together
    dp.Settle.DESCRIPTOR.fields_by_name["repairs"]: ("members", MAX_HOLDERS * MAX_PARTS),
    manifest_pb2.DataPosition.DESCRIPTOR.fields_by_name["holdings"]: ("ranges", MAX_RANGES),
}
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 10.0, 600.0
MAX_REMEMBERED = 4096  # members


def parse_round_message(data: bytes) -> dp.RoundMessage:
    """Parse a message of at most `MAX_HEADER_BYTES`. Raises `PeerMisbehaved` if one of its lists is too long."""
    try:
        message = dp.RoundMessage.FromString(data)
        _check(message)
    except DecodeError as error:
        raise PeerMisbehaved("a round message does not parse") from error
    return message


def _check(message: Message) -> None:
    """Compare the lengths of all lists with their limits, those of serialised manifests included."""
    for field, value in message.ListFields():
        if field.is_repeated:
            name = f"{message.DESCRIPTOR.name}.{field.name}"
            _check_length(name, len(value), _LIMITS.get(field, MAX_OTHERS))
            if field in _INNER_LISTS:
                inner, limit = _INNER_LISTS[field]
                _check_length(f"{name}.{inner}", sum(len(getattr(element, inner)) for element in value), limit)
        elif field.message_type is not None:
            _check(value)
        elif field in _MANIFESTS:
            _check(manifest_pb2.Manifest.FromString(value))


def _check_length(name: str, entries: int, limit: int) -> None:
    if entries > limit:
        raise PeerMisbehaved(f"{name} has {entries} entries; the limit is {limit}")


class Pauses:
    """Members that sent such messages, and how long nothing is read from them."""

    def __init__(self) -> None:
        self._pauses: dict[str, tuple[float, float]] = {}  # length of the pause in seconds, end of the pause

    def begin(self, peer: str, now: float) -> None:
        """Pause a member for twice as long as the last time, unless that was long ago."""
        seconds, until = self._pauses.pop(peer, (0.0, now))
        if now - until > LONGEST_PAUSE_SECONDS:
            seconds = 0.0
        seconds = min(max(2 * seconds, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
        self._pauses[peer] = (seconds, now + seconds)
        while len(self._pauses) > MAX_REMEMBERED:
            del self._pauses[next(iter(self._pauses))]

    def seconds_left(self, peer: str, now: float) -> float:
        """Seconds until messages of this member are read again; 0 if it is not paused."""
        return max(0.0, self._pauses.get(peer, (0.0, now))[1] - now)
