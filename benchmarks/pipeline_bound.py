"""The least time in which a route can flush, whatever its schedule. Pure.

A flush of M micro-batches keeps each stage busy for M (f + b): forward, and backward with the way back through its
span. It keeps a host's uplink busy for M (activation + gradient) / goodput, of which the first stage sends no
gradients and the last no activations, and its downlink as long. None of these can begin before the first micro-batch
got there, and when it is done the last one still has to go on from there to the first stage, in the steps of one
micro-batch: computing, transfers, distance. So

    flush ≥ max over stages, uplinks, downlinks of (way there + M × its time a micro-batch + way from there to the end)

With all micro-batches in flight this is reached but for collisions. The steady bound is the M × max alone: what a
flush of very many micro-batches comes near. Nothing is allowed for norms, verdict, codecs, headers or a full buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Flush:
    """Equal stages on equal links."""

    stages: int
    micro_batches: int
    forward_seconds: float
    backward_seconds: float
    activation_bytes: float  # on the wire
    gradient_bytes: float
    bytes_per_second: float  # measured goodput of a link, each way
    one_way_seconds: float  # the distance between two stages

    @property
    def steady_seconds(self) -> float:
        """M times the slowest of stages and links."""
        return self.micro_batches * max(each for _, each, _ in self._resources())

    @property
    def seconds(self) -> float:
        """With the way there and back."""
        return max(there + self.micro_batches * each + back for there, each, back in self._resources())

    @property
    def limited_by_link(self) -> bool:
        """Whether the steady bound is a link's."""
        return self.steady_seconds > self.micro_batches * (self.forward_seconds + self.backward_seconds)

    def _resources(self) -> Iterator[tuple[float, float, float]]:
        """Seconds before it, for each micro-batch, and after it."""
        for stage in range(self.stages):
            yield self._fill_seconds(stage), self.forward_seconds + self.backward_seconds, self._drain_seconds(stage)
            yield from self._uplink(stage)
            yield from self._downlink(stage)

    def _uplink(self, stage: int) -> Iterator[tuple[float, float, float]]:
        first, last = stage == 0, stage == self.stages - 1
        sent = (0 if last else self.activation_bytes) + (0 if first else self.gradient_bytes)
        if sent:
            begin = self._fill_seconds(stage) + self.forward_seconds + (self.backward_seconds if last else 0)
            end = (
                self._turnaround_seconds(stage + 1) if first else self._drain_seconds(stage - 1) + self.backward_seconds
            )
            yield begin, sent / self.bytes_per_second, self.one_way_seconds + end

    def _downlink(self, stage: int) -> Iterator[tuple[float, float, float]]:
        first, last = stage == 0, stage == self.stages - 1
        taken = (0 if first else self.activation_bytes) + (0 if last else self.gradient_bytes)
        if not taken:
            return
        if first:  # the stage after it has done its first backward
            leaves = (
                self.forward_seconds + self._hop + self._turnaround_seconds(1) - self._hop_back - self.backward_seconds
            )
        else:
            leaves = self._fill_seconds(stage - 1) + self.forward_seconds
        end = self._turnaround_seconds(stage) if last else self._drain_seconds(stage) + self.backward_seconds
        yield leaves + self.one_way_seconds, taken / self.bytes_per_second, end

    @property
    def _hop(self) -> float:
        return self.activation_bytes / self.bytes_per_second + self.one_way_seconds

    @property
    def _hop_back(self) -> float:
        return self.gradient_bytes / self.bytes_per_second + self.one_way_seconds

    def _fill_seconds(self, stage: int) -> float:
        """From the beginning until the first micro-batch is at a stage."""
        return stage * (self.forward_seconds + self._hop)

    def _drain_seconds(self, stage: int) -> float:
        """From when a stage has done its backward until the first one has."""
        return stage * (self._hop_back + self.backward_seconds)

    def _turnaround_seconds(self, stage: int) -> float:
        """From a micro-batch's arrival at a stage through the last one and back through the first."""
        after = self.stages - 1 - stage
        down = self.forward_seconds + after * (self._hop + self.forward_seconds)
        return down + self.backward_seconds + self._drain_seconds(self.stages - 1)
