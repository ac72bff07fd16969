"""Decide which chunk to request from which donor during a fetch from many donors. Pure: no I/O, no clock.

A digest covers a whole piece. So the first piece of a donor is a small one that no other donor contributes to: wrong
bytes identify the donor and cost one piece. A donor is proven once a piece from it was verified. It then takes larger
pieces. If no piece is left to begin, it requests chunks from the end of other donors' pieces. A piece that several
donors filled and that does not match its digest is fetched again from a single donor. The chunks that differ then
identify the liars.

The number of requests in flight follows a donor's pace: as many as it answers in about half a second. So all donors
finish together, and a donor with a small share of the downlink does not reserve a large part of the state. When no
chunk is left to request, proven donors repeat requests that are overdue at others: a donor that turns slow does not
delay the end of the fetch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from atoll.node.state.pieces import Piece

TARGET_WAIT_SECONDS = 0.5  # from a request to its answer; longer where two round trips take longer
MIN_WAIT_ROUND_TRIPS = 2.0
FIRST_DEPTH, LEAST_DEPTH, MOST_DEPTH = 4, 2, 1024  # requests in flight per donor
OVERDUE_FACTOR = 2.0  # times the usual wait: requests that take longer are repeated at other donors
_EMA_WEIGHT = 0.2  # of a new value in a moving average


@dataclass(frozen=True, slots=True)
class Chunk:
    """The elements of one request. Bounds are elements of the vector."""

    piece: int  # index among the pieces to fetch
    index: int  # within the piece
    start: int
    end: int


@dataclass
class _PieceProgress:
    """Progress of one piece."""

    piece: Piece
    chunks: tuple[Chunk, ...]
    sources: list[str | None]  # the donor of each chunk; None: missing
    wanted: set[int]  # indices of chunks to request
    owner: str | None = None  # the donor that fetches it from the front
    alone: bool = False  # all chunks must come from one donor, the owner
    avoid: frozenset[str] = frozenset()  # donors that contributed to a copy of the piece that did not match
    suspects: tuple[tuple[str, bytes], ...] = ()  # donor and digest of each chunk of that copy
    asked_twice: set[int] = field(default_factory=set)  # indices of chunks that were overdue
    checking: bool = False  # complete, its digest is being compared
    done: bool = False  # verified

    @property
    def open(self) -> bool:
        return not (self.done or self.checking)

    @property
    def untouched(self) -> bool:
        return not any(self.sources)

    def reset(self) -> None:
        self.sources = [None] * len(self.chunks)
        self.wanted = set(range(len(self.chunks)))
        self.owner = None
        self.asked_twice.clear()

    def forget(self, peers: Set[str]) -> None:
        """Discard the chunks that `peers` delivered, to fetch them from others."""
        if self.owner in peers:
            self.owner = None
        for index, source in enumerate(self.sources):
            if source in peers:
                self.sources[index] = None
                self.wanted.add(index)

    def release_owner(self) -> None:
        """Let another donor continue the piece. If all chunks must come from one donor, restart the piece."""
        self.owner = None
        if self.alone:
            self.reset()


@dataclass
class _Donor:
    in_flight: deque[tuple[Chunk, float]] = field(default_factory=deque)  # unanswered requests and their time, in order
    seconds_per_answer: float = 0.0  # seconds between two answers, moving average
    shortest_wait: float = math.inf  # seconds from a request to its answer
    last_progress_at: float = 0.0  # time of the last answer, or of the first request after a pause
    longest_wait: float = 0.0  # seconds without progress
    slow: bool = False
    present: bool = False  # connected
    delivered: int = 0  # chunks
    proven: bool = False  # contributed to a verified piece
    given_up: str = ""  # why it was dropped; empty: it was not

    @property
    def depth(self) -> int:
        """The number of requests that may be in flight."""
        if not self.seconds_per_answer:
            return FIRST_DEPTH
        return max(LEAST_DEPTH, math.ceil(min(self.usual_wait / max(self.seconds_per_answer, 1e-6), MOST_DEPTH)))

    @property
    def usual_wait(self) -> float:
        """Seconds from a request to its answer with `depth` requests in flight."""
        return max(TARGET_WAIT_SECONDS, MIN_WAIT_ROUND_TRIPS * self.shortest_wait)

    def is_overdue(self, now: float) -> bool:
        """Whether this donor's requests in flight will take much longer than usual, at its recent pace."""
        return (
            len(self.in_flight) * max(self.seconds_per_answer, now - self.last_progress_at)
            > OVERDUE_FACTOR * self.usual_wait
        )


class FetchScheduler:
    """Assigns chunks of pieces to donors. Times are seconds of any monotonic clock.

    It has more than 20 methods: each event of a donor and each rule for the choice of a donor has its own short one.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        chunk_elements: int,
        donors: Sequence[str],
        held: Mapping[str, tuple[range, ...]] | None = None,
    ) -> None:
        """`held`: donor → its layers; a donor that is not in the mapping holds all."""
        self._held = held or {}
        self._works = [_work(number, piece, chunk_elements) for number, piece in enumerate(pieces)]
        self._donors = {donor: _Donor() for donor in donors}

    @property
    def finished(self) -> bool:
        """Whether every piece is verified."""
        return all(work.done for work in self._works)

    @property
    def lacks_holders(self) -> bool:
        """Whether donors are left, but some missing piece belongs to a layer that none of them holds."""
        asked = [peer for peer in self._donors if self.is_active(peer)]
        missing = {work.piece.layer for work in self._works if work.open}
        return bool(asked) and any(not any(self._has(peer, layer) for peer in asked) for layer in missing)

    @property
    def reasons(self) -> dict[str, str]:
        """The reason for each dropped donor."""
        return {peer: donor.given_up for peer, donor in self._donors.items() if donor.given_up}

    def is_active(self, peer: str) -> bool:
        """Whether this donor was not dropped."""
        return not self._donors[peer].given_up

    def delivered(self, peer: str) -> int:
        """The number of chunks that this donor sent."""
        return self._donors[peer].delivered

    def may_ask(self, peer: str, max_in_flight: int) -> bool:
        """Whether this donor may get one more request; at most `max_in_flight` are in flight."""
        donor = self._donors[peer]
        return len(donor.in_flight) < min(donor.depth, max_in_flight)

    def expected(self, peer: str) -> Chunk | None:
        """The chunk of this donor's oldest unanswered request: answers arrive in order."""
        in_flight = self._donors[peer].in_flight
        return in_flight[0][0] if in_flight else None

    # --- requests and answers --------------------------------------------------------------------------

    def connected(self, peer: str) -> None:
        """Record that the donor is connected and has no request in flight."""
        self._donors[peer].present = True

    def next_chunk(self, peer: str, now: float) -> Chunk | None:
        """The chunk to request from this donor next; None if there is none at the moment."""
        donor = self._donors[peer]
        if donor.given_up or donor.slow or not donor.present:
            return None
        chunk = self._own_chunk(peer) or self._begin_piece(peer, donor) or self._help_others(peer, donor, now)
        if chunk is None:
            return None
        self._works[chunk.piece].wanted.discard(chunk.index)
        if not donor.in_flight:
            donor.last_progress_at = now
        donor.in_flight.append((chunk, now))
        return chunk

    def on_answer(self, peer: str, now: float) -> bool:
        """Record the answer to the donor's oldest request; returns whether to keep its bytes."""
        donor = self._donors[peer]
        chunk, requested_at = donor.in_flight.popleft()
        donor.shortest_wait = min(donor.shortest_wait, now - requested_at)
        gap = now - donor.last_progress_at
        if donor.delivered:  # the first answer takes extra round trips
            donor.seconds_per_answer = (
                (1 - _EMA_WEIGHT) * donor.seconds_per_answer + _EMA_WEIGHT * gap if donor.seconds_per_answer else gap
            )
        donor.longest_wait = max(donor.longest_wait, now - donor.last_progress_at)
        donor.last_progress_at, donor.slow = now, False
        donor.delivered += 1
        work = self._works[chunk.piece]
        if not work.open or work.sources[chunk.index] is not None or (work.alone and work.owner != peer):
            return False
        work.sources[chunk.index] = peer
        work.wanted.discard(chunk.index)
        work.checking = None not in work.sources
        return True

    def is_complete(self, piece: int) -> bool:
        """Whether all chunks of the piece arrived: compare its digest, then call `on_checked`."""
        return self._works[piece].checking

    def chunks_to_hash(self, piece: int, valid: bool) -> tuple[Chunk, ...]:
        """The chunks whose digests `on_checked` needs to identify liars. `valid`: the piece matches its digest."""
        work = self._works[piece]
        mixed = len(set(work.sources)) > 1
        return work.chunks if (work.suspects if valid else mixed) else ()

    def on_checked(self, piece: int, valid: bool, chunk_digests: Sequence[bytes]) -> None:
        """Record whether the piece matches its digest. `chunk_digests` belong to `chunks_to_hash`."""
        work = self._works[piece]
        work.checking = False
        sources = [peer for peer in work.sources if peer is not None]
        if valid:
            work.done = True
            for peer in set(sources):
                self._donors[peer].proven = True
            for (peer, claimed), digest in zip(work.suspects, chunk_digests, strict=False):
                if claimed != digest:
                    self.give_up(peer, f"sent wrong bytes in a part of {work.piece}")
            return
        given_up = {peer for peer in sources if self._donors[peer].given_up}
        if len(set(sources)) == 1:
            work.reset()
            self.give_up(sources[0], f"sent {work.piece}, which did not match its digest")
        elif given_up:
            work.forget(given_up)
        else:
            work.suspects = tuple(zip(sources, chunk_digests, strict=True))
            work.alone, work.avoid = True, frozenset(sources)
            work.reset()

    # --- donors that fail ------------------------------------------------------------------------------

    def disconnected(self, peer: str) -> None:
        """Record that the donor's stream ended, and free its requests for others. It may connect again."""
        donor = self._donors[peer]
        donor.present = donor.slow = False
        self._release(peer, donor)
        donor.in_flight.clear()

    def give_up(self, peer: str, reason: str) -> None:
        """Drop this donor. Its chunks stay until a piece with one of them fails its check."""
        self.disconnected(peer)
        self._donors[peer].given_up = reason

    def release_slow(self, now: float, slow_after_seconds: float) -> bool:
        """Mark donors as slow and free their requests for others; returns whether any donor turned slow.

        A donor is slow after `slow_after_seconds` without progress, and three times its longest earlier wait. A piece
        that must come from one donor stays with it: the caller's timeout for an answer ends that wait.
        """
        found = False
        for peer, donor in self._donors.items():
            late = now - donor.last_progress_at > max(slow_after_seconds, 3 * donor.longest_wait)
            if donor.in_flight and late and not donor.slow and self._responsive_donors() - {peer}:
                donor.slow = found = True
                self._release(peer, donor, slow_only=True)
        return found

    # --- choices -----------------------------------------------------------------------------------------

    def _own_chunk(self, peer: str) -> Chunk | None:
        for work in self._works:
            if work.owner == peer and work.open and work.wanted:
                return work.chunks[min(work.wanted)]
        return None

    def _begin_piece(self, peer: str, donor: _Donor) -> Chunk | None:
        if not donor.proven and any(work.owner == peer and not work.done for work in self._works):
            return None  # an unproven donor gets one piece at a time
        free = [work for work in self._works if work.open and work.owner is None and self._may_begin(work, peer)]
        if not free:
            return None
        if donor.proven:
            work = max(free, key=lambda work: work.piece.elements)
        else:
            work = min(free, key=lambda work: (not work.untouched, work.piece.elements))
        work.owner = peer
        return work.chunks[min(work.wanted)] if work.wanted else None

    def _may_begin(self, work: _PieceProgress, peer: str) -> bool:
        if not work.wanted or not self._has(peer, work.piece.layer):
            return False
        others = {other for other in self._responsive_donors() if self._has(other, work.piece.layer)}
        return peer not in work.avoid or others <= work.avoid

    def _has(self, peer: str, layer: int) -> bool:
        return any(layer in span for span in self._held.get(peer, (range(layer + 1),)))

    def _responsive_donors(self) -> set[str]:
        return {peer for peer, donor in self._donors.items() if donor.present and not donor.slow and not donor.given_up}

    def _help_others(self, peer: str, donor: _Donor, now: float) -> Chunk | None:
        if not donor.proven:
            return None
        mine = [work for work in self._works if work.open and not work.alone and self._has(peer, work.piece.layer)]
        shared = [work for work in mine if work.wanted]
        if not shared:
            return self._overdue(peer, donor, now)
        work = max(shared, key=lambda work: len(work.wanted))
        return work.chunks[max(work.wanted)]

    def _overdue(self, peer: str, donor: _Donor, now: float) -> Chunk | None:
        """The newest unanswered request of an overdue donor, to repeat it. Only the first answer counts."""
        for other in self._donors.values():
            if other is donor or not other.is_overdue(now):
                continue
            for chunk, _ in reversed(other.in_flight):
                work = self._works[chunk.piece]
                missing = work.open and not work.alone and work.sources[chunk.index] is None
                missing = missing and self._has(peer, work.piece.layer)
                if missing and chunk.index not in work.asked_twice:
                    work.asked_twice.add(chunk.index)
                    return chunk
        return None

    def _release(self, peer: str, donor: _Donor, *, slow_only: bool = False) -> None:
        for work in self._works:
            if work.owner == peer and work.open and not (slow_only and work.alone):
                work.release_owner()
        for chunk, _ in donor.in_flight:
            work = self._works[chunk.piece]
            if work.open and work.sources[chunk.index] is None and not (slow_only and work.alone):
                work.wanted.add(chunk.index)


def _work(number: int, piece: Piece, chunk_elements: int) -> _PieceProgress:
    starts = range(piece.start, piece.end, chunk_elements)
    chunks = tuple(
        Chunk(number, index, start, min(start + chunk_elements, piece.end)) for index, start in enumerate(starts)
    )
    return _PieceProgress(piece, chunks, [None] * len(chunks), set(range(len(chunks))))
