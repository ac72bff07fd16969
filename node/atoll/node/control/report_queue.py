"""Reports to the coordinator that are not durable there yet: kept, sent again after a broken link, and bounded."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.core.metrics_bounds import EARLY_METRICS_ROUNDS
from atoll.v1 import membership_pb2 as mb

MAX_REPORTS = 200  # in one heartbeat
MAX_REPORTED_SOURCES = 2048  # losses in one heartbeat: the coordinator bounds the entries of a message
MAX_REPORT_BYTES = 1 << 20  # in one heartbeat
MAX_KEPT = 4096  # reports that wait for the coordinator; the oldest are dropped
MAX_KEPT_ROUNDS = 256  # of these, reports of rounds, which are large
MAX_KEPT_METRICS = 1024  # of these; the coordinator keeps the full metrics of as many rounds

Report = mb.RoundReport | mb.EvaluationReport | mb.TrainingAudit | mb.NodeMetrics


@dataclass
class ReportQueue:
    """Reports that are not durable yet.

    They are `pending`, or `sent` by the heartbeat that carried them, or `early`: sent while the coordinator lacked the
    previous round.
    """

    pending: list[Report] = field(default_factory=list)
    sent: dict[int, list[Report]] = field(default_factory=dict)
    early: list[Report] = field(default_factory=list)

    def add(self, report: Report) -> None:
        """Queue a report. Drops the oldest ones beyond the limits."""
        self.pending.append(report)
        waiting = [*self.early, *self.pending]
        rounds = [item for item in waiting if isinstance(item, mb.RoundReport)]
        metrics = [item for item in waiting if isinstance(item, mb.NodeMetrics)]
        for kept, limit in ((rounds, MAX_KEPT_ROUNDS), (metrics, MAX_KEPT_METRICS), (waiting, MAX_KEPT)):
            if len(kept) > limit:
                self._drop(kept[0])
                return

    def _drop(self, report: Report) -> None:
        self.early = [item for item in self.early if item is not report]
        self.pending = [item for item in self.pending if item is not report]

    def take(self, sequence: int) -> list[Report]:
        """Move the oldest pending reports to heartbeat `sequence`, as many as one heartbeat may carry."""
        size = sources = count = 0
        for report in self.pending[:MAX_REPORTS]:
            size += report.ByteSize()
            sources += len(report.sources) if isinstance(report, mb.EvaluationReport) else 0
            if (size > MAX_REPORT_BYTES or sources > MAX_REPORTED_SOURCES) and count:
                break
            count += 1
        batch, self.pending = self.pending[:count], self.pending[count:]
        if batch:
            self.sent[sequence] = batch
        return batch

    def acknowledged(self, sequence: int, known_round: int | None = None) -> None:
        """Forget the reports up to heartbeat `sequence`: they are durable. Keep those that the coordinator ignored.

        `known_round` is the coordinator's newest round; None if its answer does not contain it.
        """
        for number in [number for number in self.sent if number <= sequence]:
            self.early += [item for item in self.sent.pop(number) if _is_early(item, known_round)]
        self.pending += [item for item in self.early if not _is_early(item, known_round)]
        self.early = [item for item in self.early if _is_early(item, known_round)]

    def requeue_unacknowledged(self) -> None:
        """Make all unacknowledged reports pending again, oldest first, after the link broke."""
        self.pending = [report for number in sorted(self.sent) for report in self.sent[number]] + self.pending
        self.sent = {}


def _is_early(report: Report, known_round: int | None) -> bool:
    """Whether the coordinator ignores this report, because it lacks the previous round."""
    if known_round is None:
        return False
    if isinstance(report, mb.RoundReport):
        return report.round.number > known_round + 1
    if isinstance(report, mb.NodeMetrics):
        return report.round > known_round + EARLY_METRICS_ROUNDS
    return report.round > known_round
