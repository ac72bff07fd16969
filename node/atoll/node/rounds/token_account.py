"""Which of this node's tokens rounds have counted, and which not yet. Plain bookkeeping."""

from __future__ import annotations

from collections import deque


class TokenAccount:
    """Totals are the trainer's. The tokens of a snapshot count with the round that contains it, or never."""

    def __init__(self, trained: int, round_number: int) -> None:
        self._counted_from = self._reported_from = trained
        self._counted_round = round_number
        self._is_frozen = False  # a snapshot exists that no round has counted
        self._frozen_tokens = 0  # tokens of the snapshot since the last round that counted us
        self._frozen_at = 0  # the trainer's total at the snapshot
        self._usual_tokens: deque[int] = deque(maxlen=2)  # tokens that rounds counted of ours, per round

    @property
    def usual_tokens(self) -> int:
        """The smaller of the last two per-round counts of our tokens; 0 if no round counted us."""
        return min(self._usual_tokens, default=0)

    def uncounted(self, trained: int) -> int:
        """Tokens that no round has counted."""
        return trained - self._counted_from

    def unreported(self, trained: int) -> int:
        """Tokens trained since the head, to report for the next round."""
        return max(0, trained - self._reported_from)

    def tokens_since_snapshot(self, trained: int) -> int:
        """Tokens trained since the last snapshot."""
        return max(0, trained - self._frozen_at)

    def freeze(self, tokens: int, trained: int) -> None:
        """Record a snapshot of `tokens` tokens."""
        self._is_frozen, self._frozen_tokens, self._frozen_at = True, tokens, trained

    def count(self, round_number: int) -> None:
        """Record that a round contains our snapshot. A second call for the same snapshot has no effect."""
        if not self._is_frozen:
            return
        self._is_frozen = False
        self._counted_from = self._reported_from = self._frozen_at
        if self._frozen_tokens:
            self._usual_tokens.append(self._frozen_tokens // max(1, round_number - self._counted_round))
        self._counted_round = round_number

    def pass_by(self, trained: int) -> None:
        """Record that the head moved without us. Tokens trained so far stay uncounted."""
        self._reported_from = trained

    def begin_anew(self, trained: int) -> None:
        """Drop the uncounted tokens."""
        self._counted_from = self._reported_from = trained
