"""The attempts at the next round in which this process took part, with their members, to detect invented results.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from atoll.core.quorum import Ballot
from atoll.core.round_id import RoundId
from atoll.v1 import manifest_pb2

_KEPT = 16  # attempts

# peer id, weight, samples, mark, probation, judged tokens; empty: no Start was received
_Inputs = tuple[tuple[str, int, int, bytes, bool, int], ...]


class EarlierAttempts:
    """Attempts at one head.

    `born`: the newest attempt that an earlier process of this node may have promised, or None.
    """

    def __init__(self, born: Ballot | None) -> None:
        self._born = born
        self._inputs: dict[RoundId, _Inputs] = {}
        self._forgotten: Ballot | None = None

    def promised(self, round_id: RoundId) -> None:
        """Record that we sent Ready for this attempt."""
        self._keep(round_id, ())

    def took_part(self, round_id: RoundId, contributions: Iterable[manifest_pb2.Contribution]) -> None:
        """Record the contributions of an attempt whose Start we accepted."""
        self._keep(round_id, _inputs(contributions))

    def _keep(self, round_id: RoundId, inputs: _Inputs) -> None:
        self._inputs[round_id] = inputs
        if len(self._inputs) > _KEPT:
            oldest = next(iter(self._inputs))
            del self._inputs[oldest]
            self._forgotten = max(self._forgotten or oldest.ballot, oldest.ballot)

    def contradicts(self, me: str, round_id: RoundId, contributions: Iterable[manifest_pb2.Contribution]) -> bool:
        """Whether our records exclude that the attempt had these contributions."""
        inputs = _inputs(contributions)
        if round_id in self._inputs:
            return self._inputs[round_id] not in ((), inputs)
        unknown = any(bound is not None and round_id.ballot <= bound for bound in (self._born, self._forgotten))
        return not unknown and any(peer == me for peer, *_ in inputs)


def _inputs(contributions: Iterable[manifest_pb2.Contribution]) -> _Inputs:
    return tuple(
        (item.peer_id, item.weight, item.samples, item.mark, item.on_probation, item.judged_tokens)
        for item in contributions
    )
