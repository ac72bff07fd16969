"""Who fetches what: the book of a fetch from many donors at once. Pure: no I/O, no clock.

A digest vouches for a whole piece, so a donor is first asked for a small piece that nobody else has a hand in: one
that lies is found out at once, at the price of that piece. Who has proved itself takes larger pieces, and helps
others with theirs from the tail when nothing is left to begin. A piece that several donors filled and that is
false is fetched again from one donor alone; then the chunks that differ name the liars.

How many questions a donor may have unanswered follows how long it takes to answer: as many as it answers in about half
a second. So all donors end together, and one whose share of our downlink is small does not keep a large part to itself.
When nothing is left to ask for, who has proved itself is also asked for what others are long about: a donor that was
fast and turns slow holds nobody up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from atoll.node.state.pieces import Piece

TARGET_WAIT_SECONDS = 0.5  # for an answer, as long as that is more than two round trips
MIN_WAIT_ROUND_TRIPS = 2.0
FIRST_DEPTH, LEAST_DEPTH, MOST_DEPTH = 4, 2, 1024
OVERDUE_FACTOR = 2.0  # times that wait, for all that a donor was asked: then others are asked for it, too
_EMA_WEIGHT = 0.2  # its part in what is smoothed


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one request asks for. Bounds are elements of the vector."""

    piece: int  # index of the piece
    index: int  # within the piece
    start: int
    end: int


@dataclass
class _PieceProgress:
    """How far one piece is."""

    piece: Piece
    chunks: tuple[Chunk, ...]
    sources: list[str | None]  # who delivered each chunk
    wanted: set[int]  # indices to be asked for
    owner: str | None = None  # the donor that works through it from the front
    alone: bool = False  # all of it must come from its owner
    avoid: frozenset[str] = frozenset()  # donors of the false version
    suspects: tuple[tuple[str, bytes], ...] = ()  # donor and digest of each chunk of the false version
    asked_twice: set[int] = field(default_factory=set)  # indices that somebody was long about
    checking: bool = False
    done: bool = False

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
        """What these delivered, who are not asked any more."""
        if self.owner in peers:
            self.owner = None
        for index, source in enumerate(self.sources):
            if source in peers:
                self.sources[index] = None
                self.wanted.add(index)

    def release_owner(self) -> None:
        """Its owner is gone or slow: others may go on with it, or begin it anew where it must come from one."""
        self.owner = None
        if self.alone:
            self.reset()


@dataclass
class _Donor:
    in_flight: deque[tuple[Chunk, float]] = field(default_factory=deque)  # asked for, when, and not answered, in order
    seconds_per_answer: float = 0.0  # seconds between two answers, smoothed
    shortest_wait: float = math.inf
    last_progress_at: float = 0.0  # of the last answer, or of the first question after a pause
    longest_wait: float = 0.0
    slow: bool = False
    present: bool = False
    delivered: int = 0  # chunks
    proven: bool = False
    given_up: str = ""  # why it is not asked any more

    @property
    def depth(self) -> int:
        """How many questions may be under way."""
        if not self.seconds_per_answer:
            return FIRST_DEPTH
        return max(LEAST_DEPTH, math.ceil(min(self.usual_wait / max(self.seconds_per_answer, 1e-6), MOST_DEPTH)))

    @property
    def usual_wait(self) -> float:
        """Seconds from a question to its answer, when as many are under way as may be."""
        return max(TARGET_WAIT_SECONDS, MIN_WAIT_ROUND_TRIPS * self.shortest_wait)

    def is_overdue(self, now: float) -> bool:
        """Whether all that it was asked takes it much longer than it should, at the pace of late."""
        return (
            len(self.in_flight) * max(self.seconds_per_answer, now - self.last_progress_at)
            > OVERDUE_FACTOR * self.usual_wait
        )


class FetchScheduler:
    """Pieces to fetch and donors to fetch them from. Times are seconds of any monotonic clock."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        chunk_elements: int,
        donors: Sequence[str],
        held: Mapping[str, tuple[range, ...]] | None = None,
    ) -> None:
        """`held` are the layers of those donors that do not hold all."""
        self._held = held or {}
        self._works = [_work(number, piece, chunk_elements) for number, piece in enumerate(pieces)]
        self._donors = {donor: _Donor() for donor in donors}

    @property
    def finished(self) -> bool:
        """Whether every piece is verified."""
        return all(work.done for work in self._works)

    @property
    def lacks_holders(self) -> bool:
        """Whether donors are still asked, and none of them holds a piece that is missing."""
        asked = [peer for peer in self._donors if self.is_active(peer)]
        missing = {work.piece.layer for work in self._works if work.open}
        return bool(asked) and any(not any(self._has(peer, layer) for peer in asked) for layer in missing)

    @property
    def reasons(self) -> dict[str, str]:
        """Why donors are not asked any more."""
        return {peer: donor.given_up for peer, donor in self._donors.items() if donor.given_up}

    def is_active(self, peer: str) -> bool:
        """Whether this donor is still of use."""
        return not self._donors[peer].given_up

    def delivered(self, peer: str) -> int:
        """How many chunks this donor sent."""
        return self._donors[peer].delivered

    def may_ask(self, peer: str, most: int) -> bool:
        """Whether one more question to this donor can be under way; `most` ever can."""
        donor = self._donors[peer]
        return len(donor.in_flight) < min(donor.depth, most)

    def expected(self, peer: str) -> Chunk | None:
        """What this donor must answer with next."""
        in_flight = self._donors[peer].in_flight
        return in_flight[0][0] if in_flight else None

    # --- questions and answers -------------------------------------------------------------------------

    def join(self, peer: str) -> None:
        """The donor can be asked, with nothing on the wire."""
        self._donors[peer].present = True

    def next_chunk(self, peer: str, now: float) -> Chunk | None:
        """The chunk to ask this donor for next; None when it has nothing to do for now."""
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
        """The donor answered its oldest question; whether the bytes are to be kept."""
        donor = self._donors[peer]
        chunk, asked = donor.in_flight.popleft()
        donor.shortest_wait = min(donor.shortest_wait, now - asked)
        gap = now - donor.last_progress_at
        if donor.delivered:  # the first answer takes round trips more
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
        """Whether all of the piece is there and its digest is to be compared, with `on_checked` for the answer."""
        return self._works[piece].checking

    def chunks_to_hash(self, piece: int, true: bool) -> tuple[Chunk, ...]:
        """The chunks whose digests `on_checked` needs for naming liars."""
        work = self._works[piece]
        mixed = len(set(work.sources)) > 1
        return work.chunks if (work.suspects if true else mixed) else ()

    def on_checked(self, piece: int, true: bool, chunk_digests: Sequence[bytes]) -> None:
        """The piece was compared with its digest; `chunk_digests` are of `chunks_to_hash`."""
        work = self._works[piece]
        work.checking = False
        sources = [peer for peer in work.sources if peer is not None]
        if true:
            work.done = True
            for peer in set(sources):
                self._donors[peer].proven = True
            for (peer, claimed), digest in zip(work.suspects, chunk_digests, strict=False):
                if claimed != digest:
                    self.give_up(peer, f"a part of {work.piece} was false")
            return
        given_up = {peer for peer in sources if self._donors[peer].given_up}
        if len(set(sources)) == 1:
            work.reset()
            self.give_up(sources[0], f"{work.piece} did not match its digest")
        elif given_up:
            work.forget(given_up)
        else:
            work.suspects = tuple(zip(sources, chunk_digests, strict=True))
            work.alone, work.avoid = True, frozenset(sources)
            work.reset()

    # --- donors that fail ------------------------------------------------------------------------------

    def left(self, peer: str) -> None:
        """The conversation ended: its questions are open again; it may `join` again."""
        donor = self._donors[peer]
        donor.present = donor.slow = False
        self._release(peer, donor)
        donor.in_flight.clear()

    def give_up(self, peer: str, reason: str) -> None:
        """Do not ask this donor again. What it delivered stays until a piece with it turns out to be false."""
        self.left(peer)
        self._donors[peer].given_up = reason

    def release_slow(self, now: float, slow_after_seconds: float) -> bool:
        """Let others take over from donors that let us wait for long, by their own measure too; whether there are any.

        A piece that must come from one donor stays with it: the shell's deadline for an answer ends that wait.
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
            return None  # let it prove itself first
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
        """What somebody else was asked last, and is long about; the first answer counts."""
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
