"""Tickets let one peer in, once, soon."""

from __future__ import annotations

from datetime import timedelta

from atoll.core.clock import ManualClock
from atoll.node.direct import tickets
from atoll.node.direct.tickets import MAX_PER_PEER, Tickets


def test_a_ticket_is_good_once() -> None:
    book = Tickets(ManualClock())
    ticket = book.issue("alice")
    assert book.redeem(bytes(32)) is None
    assert (book.redeem(ticket), book.redeem(ticket)) == ("alice", None)


def test_a_ticket_is_good_for_half_a_minute() -> None:
    clock = ManualClock()
    book = Tickets(clock)
    early, late = book.issue("alice"), book.issue("alice")
    clock.advance(tickets.LIFETIME.total_seconds() - 0.1)
    assert book.redeem(early) == "alice"
    clock.advance(timedelta(milliseconds=200).total_seconds())
    assert book.redeem(late) is None
    assert len(book) == 0


def test_one_peer_cannot_fill_the_book_nor_take_anothers_place() -> None:
    book = Tickets(ManualClock())
    kept = book.issue("bob")
    taken = [book.issue("alice") for _ in range(MAX_PER_PEER + 2)]
    assert len(book) == MAX_PER_PEER + 1
    assert [book.redeem(ticket) for ticket in taken] == [None, None, *["alice"] * MAX_PER_PEER]
    assert book.redeem(kept) == "bob"


def test_nothing_that_is_kept_lets_anybody_in() -> None:
    book = Tickets(ManualClock())
    ticket = book.issue("alice")
    assert ticket not in book._good
    assert all(book.redeem(digest) is None for digest in list(book._good))
