"""A ticket admits one peer, once, within half a minute."""

from __future__ import annotations

from datetime import timedelta

from atoll.core.clock import ManualClock
from atoll.node.direct import tickets
from atoll.node.direct.tickets import MAX_PER_PEER, Tickets, proof


def book_of_bob(clock: ManualClock | None = None) -> Tickets:
    return Tickets(clock or ManualClock(), "bob")


def shown(ticket: bytes, dialler: str = "alice", listener: str = "bob") -> bytes:
    return proof(ticket, dialler, listener)


def test_a_ticket_is_valid_once() -> None:
    book = book_of_bob()
    ticket = book.issue("alice")
    assert book.redeem(bytes(32)) is None
    assert (book.redeem(shown(ticket)), book.redeem(shown(ticket))) == ("alice", None)


def test_a_ticket_is_valid_for_half_a_minute() -> None:
    clock = ManualClock()
    book = book_of_bob(clock)
    early, late = book.issue("alice"), book.issue("alice")
    clock.advance(tickets.LIFETIME.total_seconds() - 0.1)
    assert book.redeem(shown(early)) == "alice"
    clock.advance(timedelta(milliseconds=200).total_seconds())
    assert book.redeem(shown(late)) is None
    assert len(book) == 0


def test_a_forwarded_offer_does_not_connect_to_another_node() -> None:
    """Mallory gets a ticket from bob and offers it to alice as her own."""
    book = book_of_bob()
    ticket = book.issue("mallory")
    assert book.redeem(shown(ticket, "alice", "mallory")) is None
    assert book.redeem(shown(ticket, "alice", "bob")) is None
    assert book.redeem(shown(ticket, "mallory", "bob")) == "mallory"


def test_one_peer_cannot_fill_the_tickets_nor_displace_another_peer() -> None:
    book = book_of_bob()
    kept = book.issue("carol")
    taken = [book.issue("alice") for _ in range(MAX_PER_PEER + 2)]
    assert len(book) == MAX_PER_PEER + 1
    assert [book.redeem(shown(ticket)) for ticket in taken] == [None, None, *["alice"] * MAX_PER_PEER]
    assert book.redeem(shown(kept, "carol")) == "carol"


def test_the_stored_hashes_are_no_valid_proofs() -> None:
    book = book_of_bob()
    ticket = book.issue("alice")
    assert ticket not in book._valid
    assert shown(ticket) not in book._valid
    assert all(book.redeem(digest) is None for digest in list(book._valid))
