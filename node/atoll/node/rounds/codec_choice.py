"""Which codec the next exchange uses, where a run leaves that to the swarm (`codec = "auto"`). Pure.

The most precise one whose exchange takes at most a quarter of a round, from the begin of one exchange to when there are
tokens for the next: what is trained meanwhile enters one round later, so a long exchange costs more than coarse codes
(docs/adr/0001 has what carry costs). Where even the coarsest takes longer, the most precise that takes hardly longer
than it; then rounds get longer (round_trigger.py). Where fragments take turns, each learns for itself, and a round is
their mean.

How long an exchange takes is learnt from the last ones with that codec, as every member sees them; of codecs not used
lately, in proportion to the bytes. A finer codec than the last needs some time to spare. Start names the codec, and so
does the manifest. An opener may be wrong about it, or lie: the round is as good as its codec.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from atoll.node.exchange.codecs import BY_NUMBER, CODECS, Codec
from atoll.v1 import common_pb2 as pb

AUTO = ("bf16", "int8", "int4", "int2")  # by precision, whatever the scale: fp16 loses updates of 1e-7 and below
_FIRST = "int4"  # before anything was seen
_SHARE = 0.25  # of a round's time
_SPARE = 0.8  # of that, for a finer codec than the last: else the choice would swing
_HARDLY = 1.25  # times as long
_LAST = 5  # exchanges with a codec that count
_LATELY = 16  # exchanges ago: then what a codec took is forgotten


def allowed(codec: str) -> tuple[str, ...]:
    """The names of the codecs that rounds of a run may use, the most precise first; `codec` is from its spec."""
    return AUTO if codec == "auto" else (codec,)


@dataclass
class _Times:
    """What exchanges with one codec took, in seconds."""

    seen: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))
    last: int = 0  # the number of the exchange


@dataclass
class CodecChoice:
    """`names` of the codecs, the most precise first; `elements` of the fragment, and how many take `turns` with it."""

    names: Sequence[str]
    elements: int
    turns: int = 1
    _times: dict[str, _Times] = field(default_factory=dict)
    _cut_off: bool = False  # an exchange was, before any was measured
    _count: int = 0  # exchanges
    _used: str = ""  # the last codec
    _began: float = 0.0  # the exchange under way, or the last one
    _reference: float | None = None  # when the last one that did not break off began

    def begin(self, number: pb.Codec, now: float) -> None:
        """An exchange begins with codec `number`."""
        self._began, self._used = now, BY_NUMBER[number].name
        self._count += 1

    def end(self, now: float, *, complete: bool) -> None:
        """It is over; one that is not complete would have taken longer."""
        seconds, known = now - self._began, self._times.get(self._used)
        self._reference = self._began
        if not complete and (known is None or seconds <= median(known.seen)):
            self._cut_off |= seconds > 0
            return
        times = self._times.setdefault(self._used, _Times())
        if self._count - times.last > _LATELY:
            times.seen.clear()
        times.seen.append(seconds)
        times.last = self._count

    @property
    def finest(self) -> Codec:
        """For a member that is alone: nothing travels."""
        return CODECS[self.names[0]]

    def forget_round(self) -> None:
        """This node was away: since when the others train is unknown."""
        self._reference = None

    def choose(self, now: float) -> Codec:
        """For an exchange that begins now, or could have: `now` is when there were tokens for it."""
        if len(self.names) == 1:
            return CODECS[self.names[0]]
        if not self._times:
            return CODECS[self.names[-1] if self._cut_off else _FIRST]
        if self._reference is None:
            return CODECS[self._used]
        available = _SHARE * (now - self._reference) / self.turns
        seconds = {name: self._expected(name) for name in self.names}
        for name in self.names:
            finer = self._bytes(name) > self._bytes(self._used)
            if seconds[name] <= available * (_SPARE if finer else 1.0):
                return CODECS[name]
        return next(CODECS[name] for name in self.names if seconds[name] <= _HARDLY * seconds[self.names[-1]])

    def _expected(self, name: str) -> float:
        """Seconds."""
        known = self._times.get(name)
        if known is not None and self._count - known.last <= _LATELY:
            return median(known.seen)
        latest = max(self._times, key=lambda other: self._times[other].last)
        return median(self._times[latest].seen) * self._bytes(name) / self._bytes(latest)

    def _bytes(self, name: str) -> int:
        return CODECS[name].encoded_bytes(self.elements)
