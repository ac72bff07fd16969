"""What of the tokens trained here was counted in rounds."""

from __future__ import annotations

from atoll.node.rounds.token_account import TokenAccount


def test_a_snapshot_is_counted_once_however_often_its_round_is_heard_of():
    tally = TokenAccount(0, round_number=4)
    tally.freeze(tokens=300, trained=300)
    for _ in range(2):
        tally.count(5)
    assert (tally.usual_tokens, tally.uncounted(350), tally.unreported(350), tally.tokens_since_snapshot(350)) == (
        300,
        50,
        50,
        50,
    )


def test_rounds_whose_numbers_come_again_after_a_recovery_count():
    tally = TokenAccount(0, round_number=12)
    trained = 0
    for number in (13, 14, 15, 13, 14, 15, 16):
        trained += 100
        tally.freeze(tokens=100, trained=trained)
        tally.count(number)
        assert tally.uncounted(trained) == tally.unreported(trained) == 0


def test_who_is_passed_by_keeps_its_tokens_for_a_later_round():
    tally = TokenAccount(0, round_number=0)
    tally.pass_by(200)
    assert (tally.unreported(250), tally.uncounted(250)) == (50, 250)
    tally.begin_anew(250)
    assert (tally.unreported(250), tally.uncounted(250)) == (0, 0)
