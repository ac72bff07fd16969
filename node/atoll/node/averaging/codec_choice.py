"""Which codec the next exchange uses, where a run leaves that to the swarm (`codec = "auto"`). Pure.

The most precise one whose exchange takes at most a quarter of the time that the round is trained for: what is trained
meanwhile enters one round later, so a long exchange costs more than coarse codes (docs/adr/0001 has what carry costs).
How long an exchange takes is learnt from the last ones, as every member sees them, in proportion to the bytes. Start
names the codec, and so does the manifest. An opener may be wrong about it, or lie: the round is as good as its codec.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from atoll.node.averaging.codecs import CODECS, Codec

AUTO = ("fp16", "int8", "int4", "int2")  # by precision
_FIRST = "int4"  # before anything was seen
_SHARE = 0.25  # of the round's time
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

    def weight(self, number: int) -> float:
        """The bytes of codec `number` as a part of the most precise one's; 1 when it is unknown."""
        sizes: dict[int, int] = {CODECS[it].number: CODECS[it].encoded_bytes(self.elements) for it in self.names}
        most = max(sizes.values())
        return sizes.get(number, most) / most

    def observe(self, number: int, seconds: float, *, complete: bool = True) -> None:
        """How long an exchange took; one that is not complete took at least that."""
        whole = seconds / self.weight(number)
        if complete or not self._seen or whole > median(self._seen):
            self._seen.append(whole)

    def choose(self, interval: float) -> Codec:
        """For an exchange after `interval` seconds of training."""
        codecs = [CODECS[name] for name in self.names]
        if len(codecs) == 1:
            return codecs[0]
        if not self._seen:
            return CODECS[_FIRST]
        whole = median(self._seen)
        return next((it for it in codecs if whole * self.weight(it.number) <= _SHARE * interval), codecs[-1])
