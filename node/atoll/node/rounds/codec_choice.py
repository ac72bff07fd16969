"""Which codec the next exchange uses, if the run spec leaves the choice to Atoll (`codec = "auto"`). Pure.

The choice is the most precise codec whose exchange takes at most a quarter of a round. A round lasts from the start of
one exchange until there are tokens for the next. What a node trains during an exchange enters one round later, so a
long exchange costs more than a coarse codec (docs/adr/0001 measures carry). If even the coarsest codec takes longer,
the choice is the most precise codec that is hardly slower; then rounds get longer (round_trigger.py). If fragments take
turns, each fragment has its own choice, and a round is the mean over the fragments.

The expected time is the median of the last exchanges with that codec, which every member sees. For codecs not used
lately it is scaled by the number of bytes. A codec finer than the last one needs some spare time. Start and the
manifest name the codec. An opener may choose a wrong codec by mistake or on purpose; the round then has that codec's
precision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from atoll.node.exchange.codecs import BY_NUMBER, CODECS, Codec
from atoll.v1 import common_pb2 as pb

AUTO = ("bf16", "int8", "int4", "int2")  # by precision, whatever the scale: fp16 loses updates of 1e-7 and below
_FIRST = "int4"  # before any exchange was measured
_SHARE = 0.25  # of a round's time that an exchange may take
_SPARE = 0.8  # of that share, for a finer codec than the last one; otherwise the choice would oscillate
_HARDLY = 1.25  # factor by which a codec counts as hardly slower than the coarsest
_LAST = 5  # exchanges per codec that the median uses
_LATELY = 16  # exchanges after which a codec's times are forgotten


def allowed(codec: str) -> tuple[str, ...]:
    """The names of the codecs that rounds of a run may use, the most precise first; `codec` is from its spec."""
    return AUTO if codec == "auto" else (codec,)


@dataclass
class _Times:
    """What exchanges with one codec took, in seconds."""

    seen: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))
    last: int = 0  # number of the last exchange with this codec


@dataclass
class CodecChoice:
    """`names`: codecs, most precise first. `elements`: size of the fragment. `turns`: number of fragments."""

    names: Sequence[str]
    elements: int
    turns: int = 1
    _times: dict[str, _Times] = field(default_factory=dict)
    _cut_off: bool = False  # an exchange was cut off before any was measured
    _count: int = 0  # number of exchanges
    _used: str = ""  # the last codec
    _began: float = 0.0  # start of the current or last exchange
    _reference: float | None = None  # when the last exchange that ended here began

    def begin(self, number: pb.Codec, now: float) -> None:
        """An exchange begins with codec `number`."""
        self._began, self._used = now, BY_NUMBER[number].name
        self._count += 1

    def end(self, now: float, *, complete: bool) -> None:
        """Record the time of the exchange. An incomplete exchange would have taken longer."""
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
        """The most precise codec, for a member that is alone: nothing is sent."""
        return CODECS[self.names[0]]

    def forget_round(self) -> None:
        """Forget when the last exchange began: this node was away and does not know when the others began to train."""
        self._reference = None

    def choose(self, now: float) -> Codec:
        """The codec for the next exchange. `now`: when there were enough tokens for it."""
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
        """Expected seconds of an exchange with this codec."""
        known = self._times.get(name)
        if known is not None and self._count - known.last <= _LATELY:
            return median(known.seen)
        latest = max(self._times, key=lambda other: self._times[other].last)
        return median(self._times[latest].seen) * self._bytes(name) / self._bytes(latest)

    def _bytes(self, name: str) -> int:
        return CODECS[name].encoded_bytes(self.elements)
