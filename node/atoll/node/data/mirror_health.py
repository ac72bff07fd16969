"""Statistics of each mirror of a corpus: its speed, failures, wrong answers and absences. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.node.data.mirrors import Mirror

FORGET_SECONDS = 300.0  # a mirror that was not asked for this long is tried again
_FIRST_REST_SECONDS = 1.0
_FIRST_REST_OF_LIAR_SECONDS = 30.0
_LONGEST_REST_SECONDS = 300.0
_FIRST_ABSENCE_SECONDS = 0.5  # before a mirror that lacks some bytes is asked for them again; doubles
_LONGEST_ABSENCE_SECONDS = 15.0
_SMOOTHING = 0.2
_SMALL_BYTES = 1 << 14  # shorter answers measure a mirror's latency, longer ones its throughput


@dataclass
class MirrorHealth:
    """Statistics of one mirror."""

    mirror: Mirror
    seconds: float = 0.0  # latency of an answer, smoothed
    seconds_per_byte: float = 0.0
    asked_at: float = -FORGET_SECONDS
    rests_until: float = 0.0
    failures: int = 0  # in a row
    lies: int = 0
    absences: float = 0.0  # share of the reads for which it lacked the bytes, smoothed
    bytes: int = 0  # verified
    last_problem: str = ""

    @property
    def local(self) -> bool:
        """True for a directory of this machine."""
        return self.mirror.kind == "directory"

    @property
    def problem(self) -> str:
        """Why the mirror fails now; empty after a good answer."""
        return self.last_problem if self.failures else ""

    def expected_seconds(self, size: int) -> float:
        """Expected seconds of a read of `size` bytes, including the time lost to answers without the bytes."""
        return (self.seconds + size * self.seconds_per_byte) / (1 - min(self.absences, 0.99))

    def record(self, size: int, seconds: float) -> None:
        """Count a good answer."""
        self.failures, self.rests_until, self.bytes = 0, 0.0, self.bytes + size
        self.absences *= 1 - _SMOOTHING
        if size < _SMALL_BYTES or not self.seconds:
            self.seconds = _smooth(self.seconds, seconds)
        else:
            self.seconds = min(self.seconds, seconds)
            self.seconds_per_byte = _smooth(self.seconds_per_byte, (seconds - self.seconds) / size)

    def record_absence(self, seconds: float) -> None:
        """Count the answer of a mirror that works but lacks the bytes."""
        self.failures, self.rests_until = 0, 0.0
        self.seconds = _smooth(self.seconds, seconds)
        self.absences += _SMOOTHING * (1 - self.absences)

    def record_failure(self, asked_at: float, now: float, problem: str, lied: bool) -> bool:
        """Count a bad answer to a request sent at `asked_at`, and do not ask the mirror for a while.

        Returns False, uncounted, for a request sent before that pause began: one fault can end several reads at once.
        """
        self.last_problem = problem
        if asked_at < self.rests_until and not lied:
            return False
        self.failures += 1
        self.lies += lied
        rest = _FIRST_REST_OF_LIAR_SECONDS * 2 ** min(self.lies - 1, 8) if lied else 0.0
        rest = max(rest, _FIRST_REST_SECONDS * 2 ** min(self.failures - 1, 16))
        self.rests_until = now + min(rest, _LONGEST_REST_SECONDS)
        return True


@dataclass
class Absences:
    """Mirrors that lack the bytes of one read, by `id` of their health."""

    until: dict[int, float] = field(default_factory=dict)  # monotonic; they are not asked before
    times: dict[int, int] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)

    def add(self, health: MirrorHealth, now: float, problem: str) -> None:
        """Leave a mirror out of this read for a while."""
        times = self.times[id(health)] = self.times.get(id(health), 0) + 1
        self.until[id(health)] = now + min(_FIRST_ABSENCE_SECONDS * 2 ** min(times - 1, 8), _LONGEST_ABSENCE_SECONDS)
        self.problems[id(health)] = problem


def _smooth(before: float, now: float) -> float:
    return now if not before else before + _SMOOTHING * (now - before)
