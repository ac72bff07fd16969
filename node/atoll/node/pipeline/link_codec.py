"""Which code each link of a route uses, where the run leaves that to its nodes (`[pipeline] codec = "auto"`).

`bf16` where there is room for it: inside one building, and where what this stage sends in it, at the pace at which it
computes, takes a good part less than what its side of the link was measured to carry. Else, and as long as nothing is
known, `int8`, which costs a run nothing in loss, but processors more (measured: `benchmarks/pipeline_loss.py`,
`benchmarks/codecs.py`). Who sends chooses; every message names its code, and whoever takes it accepts all of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import NoReturn

from atoll.core import log
from atoll.node.pipeline.route import RoutePlace
from atoll.node.pipeline.stage_socket import FrameType, StageSocket

NARROW_CODEC, WIDE_CODEC = "int8", "bf16"
WIDE_BYTES = 2  # an element
WIDEN_BELOW = 0.3  # of the measured rate, to turn to `bf16`: a stage in the middle has two links, and rounds send, too
NARROW_ABOVE = 0.45  # to stay with it: rates waver
LOOK_SECONDS = 5.0

_log = log.get("route")


def choose_codec(before: str, wanted: float, rate: float) -> str:
    """The code of a link that had `before`.

    `wanted`: bytes per second in `bf16`, 0 while nobody knows. `rate`: what our side carries, infinite where the other
    one is near, 0 while nobody knows.
    """
    if math.isinf(rate):
        return WIDE_CODEC
    fits = 0 < wanted <= (NARROW_ABOVE if before == WIDE_CODEC else WIDEN_BELOW) * rate
    return WIDE_CODEC if fits else NARROW_CODEC


class LinkCodecs:
    """Tells a trainer the codes of its links for as long as it has its place; it begins with `int8` in all of them."""

    def __init__(
        self,
        cable: StageSocket,
        place: RoutePlace,
        micro_batch_elements: int,
        micro_batch_seconds: Callable[[], float],
        bytes_per_second_to: Callable[[str], float],
    ) -> None:
        """`micro_batch_seconds`: compute time, 0 while unknown. `bytes_per_second_to`: measured rate to a peer."""
        neighbours = (stage for stage in (place.stage - 1, place.stage + 1) if 0 <= stage < place.stages)
        self.codecs = dict.fromkeys(neighbours, NARROW_CODEC)  # by the stage that a link leads to
        self._cable, self._peers = cable, place.peers
        self._bytes = WIDE_BYTES * micro_batch_elements
        self._seconds, self._rate_to = micro_batch_seconds, bytes_per_second_to

    async def run(self) -> NoReturn:
        """Until cancelled."""
        for stage in self.codecs:
            self._tell(stage)  # what was on its way to the trainer for another place may reach it in this one
        while True:
            self.update()
            await asyncio.sleep(LOOK_SECONDS)

    def update(self) -> None:
        """Choose anew."""
        seconds = self._seconds()
        wanted = self._bytes / seconds if seconds else 0.0
        for stage, before in self.codecs.items():
            code = choose_codec(before, wanted, self._rate_to(self._peers[stage]))
            if code != before:
                self.codecs[stage] = code
                _log.info("activations and gradients have another code", peer=self._peers[stage], codec=code)
                self._tell(stage)

    def _tell(self, stage: int) -> None:
        self._cable.send_nowait(FrameType.CODEC, stage, 0, self.codecs[stage].encode())
