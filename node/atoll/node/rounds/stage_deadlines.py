"""How long the stages of recent rounds took, as the opener measured them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.learned_deadline import LearnedDeadline, ResponseTimes
from atoll.node.rounds.codec_choice import CodecChoice
from atoll.node.rounds.types import RoundPolicy

_FLOOR = 1.0  # seconds; no stage gets less in addition to its measured time


@dataclass
class StageDeadlines:
    """Learned deadlines of each stage of one fragment's rounds, and the choice of its codec."""

    ready: LearnedDeadline
    answers: ResponseTimes  # from Open to each member's Ready
    exchanges: dict[int, LearnedDeadline]  # by the number of the codec
    result: LearnedDeadline
    result_with_repair: LearnedDeadline  # the same where a member has to build its state again
    vote: LearnedDeadline
    codec: CodecChoice
    exchange_ceiling: float

    @classmethod
    def of(cls, policy: RoundPolicy) -> tuple[StageDeadlines, ...]:
        """Initial deadlines for each fragment, because some are larger than others."""
        timeouts = (policy.ready_timeout, policy.exchange_timeout, policy.decision_timeout)
        ready, exchange, decision = (timeout.total_seconds() for timeout in timeouts)
        all_ready, answers, turns = LearnedDeadline(_FLOOR, ready), ResponseTimes(), len(policy.fragments)
        vote = LearnedDeadline(_FLOOR, decision)
        return tuple(
            cls(
                all_ready,
                answers,
                {},
                LearnedDeadline(_FLOOR, decision),
                LearnedDeadline(_FLOOR, decision),
                vote,
                CodecChoice(policy.codecs, fragment.elements, turns),
                exchange,
            )
            for fragment in policy.fragments
        )

    def exchange(self, codec: int) -> LearnedDeadline:
        """The deadline of exchanges with codec number `codec`."""
        return self.exchanges.setdefault(codec, LearnedDeadline(_FLOOR, self.exchange_ceiling))
