"""Codec choice for each link of a route, if the run leaves it to its nodes (`[pipeline] codec = "auto"`).

A link uses `bf16` inside one local network, and if `bf16` needs well below the measured rate of its side of the link.
Otherwise, and while nothing is measured, it uses `int8`. `int8` costs a run nothing in loss but more processor time
(measured with `benchmarks/pipeline_loss.py` and `benchmarks/codecs.py`). The sender chooses. Every message names its
codec, and a receiver accepts all of them.
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
WIDE_BYTES = 2  # per element
# share of the measured rate below which `bf16` is used; a middle stage has two links, and rounds also send
WIDEN_BELOW = 0.3
NARROW_ABOVE = 0.45  # share above which `bf16` ends: the gap absorbs fluctuating rates
LOOK_SECONDS = 5.0

_log = log.get("route")


def choose_codec(before: str, wanted: float, rate: float) -> str:
    """Choose the codec of a link that used `before`.

    `wanted`: bytes per second that the link needs in `bf16`; 0 while unknown. `rate`: bytes per second that this side
    carries; infinite in a local network, 0 while unknown.
    """
    if math.isinf(rate):
        return WIDE_CODEC
    fits = 0 < wanted <= (NARROW_ABOVE if before == WIDE_CODEC else WIDEN_BELOW) * rate
    return WIDE_CODEC if fits else NARROW_CODEC


class LinkCodecs:
    """Chooses the codecs of a stage's links and sends them to the trainer. All links start with `int8`."""

    def __init__(
        self,
        stage_socket: StageSocket,
        place: RoutePlace,
        micro_batch_elements: int,
        micro_batch_seconds: Callable[[], float],
        bytes_per_second_to: Callable[[str], float],
    ) -> None:
        """`micro_batch_seconds`: compute time, 0 while unknown. `bytes_per_second_to`: measured rate to a peer."""
        neighbours = (stage for stage in (place.stage - 1, place.stage + 1) if 0 <= stage < place.stages)
        self.codecs = dict.fromkeys(neighbours, NARROW_CODEC)  # by the stage that a link leads to
        self._stage_socket, self._peers = stage_socket, place.peers
        self._bytes = WIDE_BYTES * micro_batch_elements
        self._seconds, self._rate_to = micro_batch_seconds, bytes_per_second_to

    async def run(self) -> NoReturn:
        """Choose again every `LOOK_SECONDS`, until cancelled."""
        for stage in self.codecs:
            self._tell(stage)  # a choice for the previous route may still reach the trainer after `enter_route`
        while True:
            self.update()
            await asyncio.sleep(LOOK_SECONDS)

    def update(self) -> None:
        """Choose the codecs again, and send the changed ones to the trainer."""
        seconds = self._seconds()
        wanted = self._bytes / seconds if seconds else 0.0
        for stage, before in self.codecs.items():
            codec = choose_codec(before, wanted, self._rate_to(self._peers[stage]))
            if codec != before:
                self.codecs[stage] = codec
                _log.info("link_codec_changed", peer=self._peers[stage], codec=codec)
                self._tell(stage)

    def _tell(self, stage: int) -> None:
        self._stage_socket.send_nowait(FrameType.CODEC, stage, 0, self.codecs[stage].encode())
