"""The exchange and the outer step of a simulated round: a function from who was there to digests."""

import hashlib
from collections.abc import Callable

from atoll.core.round_id import RoundId
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

_SCREENED = 64  # of 256 attempts have somebody whom most reducers leave out
_AGREE = 192  # of 256 reducers do

Reaches = Callable[[str, str], bool]  # whether the first peer can hear the second, which is up


class Exchanges:
    """All exchanges of a run: what every reducer summed, from whom."""

    def __init__(self, reaches: Reaches) -> None:
        self._reaches = reaches
        self._there: dict[RoundId, set[str]] = {}
        self._sums: dict[tuple[RoundId, int], tuple[bytes, frozenset[str]]] = {}

    def join(self, round_id: RoundId, peer: str) -> None:
        """`peer` takes part from now on."""
        self._there.setdefault(round_id, set()).add(peer)

    def parts(
        self, round_id: RoundId, peer: str, start: dp.Start
    ) -> tuple[tuple[bytes, ...], tuple[manifest_pb2.Verdict, ...]]:
        """What `peer` has at its end: a digest for each part, empty for a missing one; and who is missing in its sums,
        or was left out of all of them, which is nobody most of the time."""
        digests: list[bytes] = []
        verdicts: list[manifest_pb2.Verdict] = []
        for index, piece in enumerate(start.partition):
            count = -(-(piece.end - piece.start) // start.part_elements)
            summed = self._sum(round_id, peer, start, index, piece.reducer)
            if summed is None:
                digests += [b""] * count
                continue
            digest, who = summed
            digests += [hashlib.sha256(digest + bytes([part])).digest() for part in range(count)]
            odd, places = _odd(round_id, start), [item.peer_id for item in start.contributions]
            if piece.reducer == peer and count and peer in places:
                for place, item in enumerate(start.contributions):
                    verdict = manifest_pb2.Verdict(reducer=places.index(peer), contributor=place)
                    if item.weight and item.peer_id not in who:
                        verdict.parts_missing = count
                        verdicts.append(verdict)
                    elif item.peer_id == odd and digest[0] < _AGREE:
                        verdict.parts_left_out = count
                        verdicts.append(verdict)
        return tuple(digests), tuple(verdicts)

    def _sum(
        self, round_id: RoundId, peer: str, start: dp.Start, index: int, reducer: str
    ) -> tuple[bytes, frozenset[str]] | None:
        """The reducer's average as `peer` has it: the same for all, or nothing."""
        there = self._there[round_id]
        if reducer not in there or (reducer != peer and not self._reaches(peer, reducer)):
            return None
        if (round_id, index) not in self._sums:
            who = frozenset(
                item.peer_id
                for item in start.contributions
                if item.weight
                and item.peer_id in there
                and (item.peer_id == reducer or self._reaches(reducer, item.peer_id))
            )
            name = f"{round_id}/{index}/{sorted(who)}".encode()
            self._sums[round_id, index] = (hashlib.sha256(name).digest(), who)
        return self._sums[round_id, index]


def _odd(round_id: RoundId, start: dp.Start) -> str:
    """Whom screening leaves out of an attempt's sums: nobody most of the time."""
    drawn = hashlib.sha256(round_id.key.encode()).digest()
    contributors = [item.peer_id for item in start.contributions if item.weight]
    screened = drawn[0] < _SCREENED and len(contributors) > 2
    return contributors[drawn[1] % len(contributors)] if screened else ""


def nonce_of(round_id: RoundId, peer: str) -> bytes:
    """What a holder tells with its parts."""
    return hashlib.sha256(f"{round_id.key}/{peer}".encode()).digest()[:16]


def outer_step(round_id: RoundId, digests: tuple[bytes, ...]) -> bytes:
    """The digest of the state that follows from these parts."""
    return hashlib.sha256(round_id.key.encode() + b"".join(digests)).digest()
