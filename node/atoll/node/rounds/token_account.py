"""Which of the tokens that this node trained were counted in rounds, and which were not yet. Plain bookkeeping."""

from __future__ import annotations

from collections import deque


class TokenAccount:
    """Totals are the trainer's. What a snapshot froze is counted with the round that holds it, or never."""

    def __init__(self, trained: int, round_number: int) -> None:
        self._counted_from = self._reported_from = trained
        self._counted_round = round_number
        self._is_frozen = False  # there is a snapshot that was not counted
        self._frozen_tokens = 0  # of the snapshot, since the round before that counted us
        self._frozen_at = 0  # the total then
        self._usual_tokens: deque[int] = deque(maxlen=2)  # what was counted of ours, a round

    @property
    def usual_tokens(self) -> int:
        """The fewer tokens of the last two rounds that counted ours; 0: none did."""
        return min(self._usual_tokens, default=0)

    def uncounted(self, trained: int) -> int:
        """What no round holds."""
        return trained - self._counted_from

    def unreported(self, trained: int) -> int:
        """What was trained since the head, as far as rounds should open for it."""
        return max(0, trained - self._reported_from)

    def tokens_since_snapshot(self, trained: int) -> int:
        """What was trained since the last snapshot."""
        return max(0, trained - self._frozen_at)

    def freeze(self, tokens: int, trained: int) -> None:
        """A snapshot was taken, of that many tokens."""
        self._is_frozen, self._frozen_tokens, self._frozen_at = True, tokens, trained

    def count(self, round_number: int) -> None:
        """That round holds our snapshot. Heard twice, it is counted once."""
        if not self._is_frozen:
            return
        self._is_frozen = False
        self._counted_from = self._reported_from = self._frozen_at
        if self._frozen_tokens:
            self._usual_tokens.append(self._frozen_tokens // max(1, round_number - self._counted_round))
        self._counted_round = round_number

    def pass_by(self, trained: int) -> None:
        """The head moved without us: what was trained stays uncounted."""
        self._reported_from = trained

    def begin_anew(self, trained: int) -> None:
        """What was not counted is dropped."""
        self._counted_from = self._reported_from = trained
