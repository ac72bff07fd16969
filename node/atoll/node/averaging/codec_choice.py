"""Which codec the next exchange uses, where a run leaves that to the swarm (`codec = "auto"`). Pure.

The most precise one whose exchange takes at most a quarter of a round, from the last Start to this one: what is trained
meanwhile enters one round later, so a long exchange costs more than coarse codes (docs/adr/0001 has what carry costs).
How long an exchange takes is learnt from the last ones, as every member sees them, in proportion to the bytes. A finer
codec than the last needs some time to spare. Start names the codec, and so does the manifest. An opener may be wrong
about it, or lie: the round is as good as its codec.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from atoll.node.averaging.codecs import CODECS, Codec

AUTO = ("fp16", "int8", "int4", "int2")  # by precision
_FIRST = "int4"  # before anything was seen
_SHARE = 0.25  # of a round's time
_SPARE = 0.8  # of that, for a finer codec than the last: else the choice would swing
_LAST = 5  # exchanges that count


def allowed(codec: str) -> tuple[str, ...]:
    """The names of the codecs that rounds of a run may use, the most precise first; `codec` is from its spec."""
    return AUTO if codec == "auto" else (codec,)


@dataclass
class CodecChoice:
    """`elements` of the flat vector; `names` of the codecs, the most precise first."""

    names: Sequence[str]
    elements: int
    _seen: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))  # seconds, had it been the first codec
    _began: float | None = None  # the last exchange
    _used: int = 0  # the number of its codec

    def weight(self, number: int) -> float:
        """The bytes of codec `number` as a part of the most precise one's; 1 when it is unknown."""
        sizes: dict[int, int] = {CODECS[it].number: CODECS[it].encoded_bytes(self.elements) for it in self.names}
        most = max(sizes.values())
        return sizes.get(number, most) / most

    def begin(self, number: int, now: float) -> None:
        """An exchange begins."""
        self._began, self._used = now, number

    def end(self, now: float, *, complete: bool) -> None:
        """It is over; one that is not complete took at least that long."""
        assert self._began is not None
        whole = (now - self._began) / self.weight(self._used)
        if complete or (self._seen and whole > median(self._seen)):
            self._seen.append(whole)

    def choose(self, now: float) -> Codec:
        """For an exchange that begins now."""
        codecs = [CODECS[name] for name in self.names]
        if len(codecs) == 1:
            return codecs[0]
        if not self._seen or self._began is None:
            return CODECS[_FIRST]
        whole, available, used = median(self._seen), _SHARE * (now - self._began), self.weight(self._used)
        for codec in codecs:
            weight = self.weight(codec.number)
            if whole * weight <= available * (_SPARE if weight > used else 1.0):
                return codec
        return codecs[-1]
