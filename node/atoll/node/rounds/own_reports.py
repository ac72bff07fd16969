"""Reports of this node to others: its tokens to the seats, and its head to members behind it. Pure."""

from __future__ import annotations

from atoll.core.round_id import RoundId
from atoll.node.rounds import types as rt
from atoll.node.rounds.standing import Standing
from atoll.v1 import dataplane_pb2 as dp

_BEHIND = ("report", "open", "ready", "parts", "digest")  # messages that a member behind us sends


class OwnReports:
    """The progress of this node at its head as last reported, and which peers got the head."""

    def __init__(self, at: Standing) -> None:
        self._at = at
        self._progress = rt.Progress(0, 0.0, 0)
        self._head_sent_at: dict[str, float] = {}  # peers to which we sent our head, and when

    def take(self, progress: rt.Progress) -> None:
        """Record what this node has trained since its head."""
        self._progress = progress

    def froze(self) -> None:
        """Record that a snapshot was taken: nothing is trained since."""
        self._progress = rt.Progress(self._progress.tokens, self._progress.step_seconds, 0)

    def move(self) -> None:
        """Reset for a new head."""
        self._head_sent_at = {}
        self._progress = rt.Progress(0, self._progress.step_seconds, 0)

    def send_if_due(self) -> None:
        """Report to the other seats if a report is due. Seats that are ahead answer with their head."""
        tokens, step_seconds = self._progress.tokens, self._progress.step_seconds
        if not self._at.trigger.hear_self(tokens, self._at.leaving, step_seconds, self._at.now):
            return
        if self._at.void:
            self._at.check_history()
        self.send()

    def send(self) -> None:
        """Report to the other seats."""
        for peer in self._at.other_openers:
            self.send_to(peer)

    def send_to(self, peer: str) -> None:
        """Report to one member."""
        report = self._report(self._at.round_id, self._progress.tokens)
        report.leaving = self._at.leaving
        self._at.send(peer, dp.RoundMessage(report=report))

    def send_ahead(self) -> None:
        """With our attestation, report the tokens that remain after the commit.

        So the next opener knows them at once.
        """
        number = self._at.head.round + 2
        fragment = self._at.policy.fragment_of(number).index
        expected = RoundId(self._at.policy.run_id, self._at.plan.version, fragment, number, 0)
        report = self._report(expected, self._progress.tokens_since_snapshot)
        report.expected = True
        for peer in self._at.other_openers:
            self._at.send(peer, dp.RoundMessage(report=report))

    def tell_head(self, peer: str, kind: str) -> None:
        """Send our head to a member that is behind, at most twice per report interval."""
        interval, head = self._at.policy.report_interval.total_seconds(), self._at.head
        if kind not in _BEHIND or peer not in self._at.plan.members or not head.committed.signatures:
            return
        if self._at.now - self._head_sent_at.get(peer, float("-inf")) < interval / 2:
            return
        self._head_sent_at[peer] = self._at.now
        commit = dp.Commit(round=head.manifest.round, manifest=head.committed)
        self._at.send(peer, dp.RoundMessage(commit=commit))

    def _report(self, round_id: RoundId, tokens: int) -> dp.TokenReport:
        step_ms = min(int(self._progress.step_seconds * 1000), 2**32 - 1)
        return dp.TokenReport(round=round_id.to_proto(), tokens=tokens, step_ms=step_ms)
