"""Verified reads from several mirrors: the fastest first, another one if it is slow, fails or sends wrong bytes.

A read that lasts longer than a mirror's usual time is *hedged*: a second mirror is asked as well, and the first answer
with the right hash counts (Dean & Barroso 2013, "The Tail at Scale"). A mirror that fails rests for a time that doubles
with each failure; one that sent bytes with another hash rests longer. A mirror that lacks some bytes is left out of
that read only, for a while. If all fail, the read is retried until `patience` ends: a home connection can fail for
minutes, and a node should wait for it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import Unreachable
from atoll.node.data.blocks import BlockMismatch
from atoll.node.data.mirror_health import FORGET_SECONDS, Absences, MirrorHealth
from atoll.node.data.mirrors import BlockAbsent, Cancelled, Kind, Mirror, MirrorFailed

PATIENCE = timedelta(minutes=10)
_ATTEMPT_SECONDS = 120.0  # for a short answer; a slower answer counts as a failure
_SLOWEST_BYTES_PER_SECOND = 20_000.0  # rate of a long answer, below which it counts as a failure
_LIKELY_WHOLE_BYTES = 8 << 20  # assumed size of a file of unknown size
_HEDGE_SECONDS = 1.0  # added to the usual time, before a second mirror is asked
_HEDGE_FACTOR = 3.0
_ASK_AGAIN_SECONDS = 10.0  # while all mirrors rest

OnTrouble = Callable[[str], object]  # called about once a second while no mirror answers, with the reasons
Check = Callable[[bytes], object]  # raises `BlockMismatch` for wrong bytes
Read = Callable[[Mirror, Cancelled], bytes]


@dataclass(frozen=True)
class Fetched:
    """Verified bytes, and the kind of mirror that sent them."""

    data: bytes
    kind: Kind


@dataclass
class _Attempt:
    health: MirrorHealth
    began: float
    cancelled: threading.Event = field(default_factory=threading.Event)


def no_trouble_callback(_: str) -> None:
    """Ignore trouble."""


class Fetcher:
    """Reads from mirrors. May be used by several threads at once. Has no thread while nothing is read.

    It has more than 20 methods: one read races several mirrors, and each step of that race is a short one.
    """

    def __init__(
        self,
        mirrors: Sequence[Mirror],
        clock: Clock,
        patience: timedelta = PATIENCE,
        on_trouble: OnTrouble = no_trouble_callback,
    ) -> None:
        """`mirrors`: at least one, preferred ones first. `patience` and `on_trouble` apply until `opened` is called."""
        if not mirrors:
            raise ValueError("a fetcher needs a mirror")
        self.mirrors = tuple(MirrorHealth(mirror) for mirror in mirrors)
        self.hedged = 0  # reads for which a second mirror was asked
        self._clock, self._patience, self._on_trouble = clock, patience.total_seconds(), on_trouble
        self._lock = threading.Lock()
        self._own = threading.local()
        self._closed = False
        self._lacking: dict[int, str] = {}  # reads that no mirror can serve now, and why

    @property
    def all_local(self) -> bool:
        """True if every mirror is a directory of this machine."""
        return all(health.local for health in self.mirrors)

    @property
    def prefers_local(self) -> bool:
        """True if the next read will use a directory of this machine."""
        now = self._clock.monotonic()
        return any(health.local and health.rests_until <= now for health in self.mirrors)

    @property
    def bytes_fetched(self) -> int:
        """Verified bytes that came over the network."""
        return sum(health.bytes for health in self.mirrors if not health.local)

    @property
    def trouble(self) -> str:
        """Why some read fails now; empty while some mirror works and has all the bytes that are read."""
        if all(health.failures for health in self.mirrors):
            return "; ".join(health.last_problem for health in self.mirrors)
        with self._lock:
            return next(iter(self._lacking.values()), "")

    def opened(self) -> None:
        """Use the default patience for the reads of training, which reports trouble itself."""
        self._patience, self._on_trouble = PATIENCE.total_seconds(), no_trouble_callback

    def close(self) -> None:
        """Make all reads end soon with `Unreachable`, and close the connections."""
        self._closed = True
        for health in self.mirrors:
            health.mirror.close()

    @contextmanager
    def impatient(self, seconds: float) -> Iterator[None]:
        """Limit the reads of this thread to `seconds` during the block."""
        self._own.patience = seconds
        try:
            yield
        finally:
            del self._own.patience

    def read(self, path: str, start: int, stop: int, check: Check) -> bytes:
        """Return bytes of a file that pass `check`. Raises `Unreachable` if no mirror gives them in time."""
        return self.fetch(path, start, stop, check).data

    def fetch(self, path: str, start: int, stop: int, check: Check) -> Fetched:
        """Read as `read` does, and also return the kind of mirror that the bytes came from."""
        return self._fetch(path, stop - start, lambda mirror, stopped: mirror.read(path, start, stop, stopped), check)

    def read_whole(self, path: str, at_most: int, check: Check) -> bytes:
        """Return a file of unknown size that passes `check`. Raises `Unreachable`."""
        size = min(at_most, _LIKELY_WHOLE_BYTES)
        return self._fetch(path, size, lambda mirror, stopped: mirror.read_whole(path, at_most, stopped), check).data

    def _fetch(self, what: str, size: int, read: Read, check: Check) -> Fetched:
        gives_up_at = self._clock.monotonic() + getattr(self._own, "patience", self._patience)
        answers: queue.SimpleQueue[tuple[_Attempt, bytes | Exception]] = queue.SimpleQueue()
        attempts: list[_Attempt] = []
        absences = Absences()
        try:
            while not self._closed:
                now = self._clock.monotonic()
                if now >= gives_up_at:
                    break
                candidate, wait = self._choose(size, now, [attempt.health for attempt in attempts], absences)
                if candidate is not None and (not attempts or self._is_late(attempts[-1], size, now)):
                    self.hedged += bool(attempts)
                    attempts.append(self._begin(candidate, now, read, check, answers))
                elif attempts:
                    wait = self._late_at(attempts[-1], size) - now if candidate is not None else 1.0
                try:
                    attempt, answer = answers.get(timeout=min(max(wait, 0.01), 1.0, max(0.01, gives_up_at - now)))
                except queue.Empty:
                    self._end_stuck(attempts, size)
                    self._note_absences(attempts, absences)
                    if trouble := self.trouble:
                        self._on_trouble(trouble)
                    continue
                if attempt in attempts:
                    attempts.remove(attempt)
                if isinstance(answer, bytes):
                    self._learn_from_losers(attempts)
                    return Fetched(answer, attempt.health.mirror.kind)
                if isinstance(answer, BlockAbsent):
                    absences.add(attempt.health, self._clock.monotonic(), str(answer))
                    self._note_absences(attempts, absences)
        finally:
            with self._lock:
                self._lacking.pop(id(absences), None)
            for attempt in attempts:
                attempt.cancelled.set()
        problems = "; ".join(
            absences.problems.get(id(health)) or health.last_problem or f"{health.mirror.name} is slow"
            for health in self.mirrors
        )
        raise Unreachable(f"no mirror gives {what} of the corpus: {problems}", "check the line and the mirrors")

    def _note_absences(self, attempts: Sequence[_Attempt], absences: Absences) -> None:
        """Record why a read waits if each mirror fails or lacks its bytes."""
        with self._lock:
            problems = [absences.problems.get(id(health)) or health.last_problem for health in self.mirrors]
            lacks = absences.problems and not attempts
            if lacks and all(health.failures or id(health) in absences.problems for health in self.mirrors):
                self._lacking[id(absences)] = "; ".join(problems)

    def _choose(
        self, size: int, now: float, busy: Sequence[MirrorHealth], absences: Absences
    ) -> tuple[MirrorHealth | None, float]:
        """Return the mirror to ask next and 0, or None and the seconds until a mirror may be asked."""

        def asked_from(health: MirrorHealth) -> float:
            return max(health.rests_until, absences.until.get(id(health), now))

        with self._lock:
            free = [health for health in self.mirrors if not any(health is other for other in busy)]
            rested = [health for health in free if asked_from(health) <= now]
            if rested:
                unknown = [health for health in rested if now - health.asked_at >= FORGET_SECONDS]
                chosen = min(rested, key=lambda health: (not health.local, health.expected_seconds(size)))
                if unknown and not chosen.local:
                    chosen = unknown[0]
                return chosen, 0.0
            if free and not busy:  # no mirror answers: ask one from time to time, so that its recovery is noticed
                soonest = min(free, key=asked_from)
                if now - max(health.asked_at for health in free) >= _ASK_AGAIN_SECONDS:
                    return soonest, 0.0
            return None, min(map(asked_from, free), default=now + 1.0) - now

    def _late_at(self, attempt: _Attempt, size: int) -> float:
        return attempt.began + _HEDGE_SECONDS + _HEDGE_FACTOR * attempt.health.expected_seconds(size)

    def _is_late(self, attempt: _Attempt, size: int, now: float) -> bool:
        return now >= self._late_at(attempt, size)

    def _begin(
        self,
        health: MirrorHealth,
        now: float,
        read: Read,
        check: Check,
        answers: queue.SimpleQueue[tuple[_Attempt, bytes | Exception]],
    ) -> _Attempt:
        attempt = _Attempt(health, now)
        health.asked_at = now

        def run() -> None:
            try:
                answers.put((attempt, self._ask(attempt, read, check)))
            except Exception as error:
                answers.put((attempt, error))

        if health.local:
            run()
        else:
            threading.Thread(target=run, name="corpus-read", daemon=True).start()
        return attempt

    def _ask(self, attempt: _Attempt, read: Read, check: Check) -> bytes:
        health = attempt.health
        try:
            data = read(health.mirror, attempt.cancelled.is_set)
            check(data)
        except BlockMismatch as error:
            problem = f"{health.mirror.name} sends wrong bytes: {error}"
            if health.local:  # one file has changed: continue to read the others
                with self._lock:
                    health.lies, health.last_problem = health.lies + 1, problem
                if health.lies == 1:
                    log.get("corpus").warning("mirror_lies", problem=problem)
                raise BlockAbsent(problem) from error
            self._record_failure(attempt, problem, lied=True)
            raise
        except BlockAbsent:
            with self._lock:
                health.record_absence(self._clock.monotonic() - attempt.began)
            raise
        except MirrorFailed as error:
            self._record_failure(attempt, str(error), lied=False)
            raise
        except Exception as error:
            self._record_failure(attempt, f"{health.mirror.name}: {error or type(error).__name__}", lied=False)
            raise
        with self._lock:
            health.record(len(data), self._clock.monotonic() - attempt.began)
        return data

    def _record_failure(self, attempt: _Attempt, problem: str, lied: bool) -> None:
        if attempt.cancelled.is_set() and not lied:
            return  # its time was counted when another mirror answered first
        with self._lock:
            counts = attempt.health.record_failure(attempt.began, self._clock.monotonic(), problem, lied)
            is_news = counts and (lied or attempt.health.failures == 1)
        if is_news and not self._closed:
            log.get("corpus").warning("mirror_lies" if lied else "mirror_fails", problem=problem)

    def _learn_from_losers(self, attempts: Sequence[_Attempt]) -> None:
        """Record that these mirrors take at least as long as they have taken so far."""
        now = self._clock.monotonic()
        with self._lock:
            for attempt in attempts:
                attempt.health.seconds = max(attempt.health.seconds, now - attempt.began)

    def _end_stuck(self, attempts: list[_Attempt], size: int) -> None:
        now, longest = self._clock.monotonic(), _ATTEMPT_SECONDS + size / _SLOWEST_BYTES_PER_SECOND
        for attempt in [one for one in attempts if now - one.began >= longest]:
            self._record_failure(attempt, f"{attempt.health.mirror.name} is slow", lied=False)
            attempt.cancelled.set()
            attempts.remove(attempt)
