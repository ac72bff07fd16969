"""A micro-batch counts once or not at all, whatever befalls its flushes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.flush_ledger import FlushLedger

from atoll.core.errors import InvalidTransition


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=30))
def test_every_id_is_counted_or_waiting_and_in_order(flushes: list[tuple[int, bool]]) -> None:
    ledger = FlushLedger()
    ledger.add(range(40))
    for count, succeeds in flushes:
        if not ledger.waiting:
            break
        taken = ledger.begin(count)
        (ledger.decide if succeeds else ledger.abort)(ledger.flush)
        assert (set(taken) <= ledger.counted) == succeeds
    assert ledger.waiting == tuple(range(len(ledger.counted), 40))
    assert ledger.counted == set(range(len(ledger.counted)))


def test_what_would_count_twice_is_refused() -> None:
    ledger = FlushLedger()
    ledger.add([7, 8])
    with pytest.raises(InvalidTransition, match="queued before"):
        ledger.add([8])
    ledger.begin(1)
    with pytest.raises(InvalidTransition, match="under way"):
        ledger.begin(1)
    ledger.decide(1)
    for end in (ledger.decide, ledger.abort):
        with pytest.raises(InvalidTransition, match="not under way"):
            end(1)
    with pytest.raises(InvalidTransition, match="queued before"):
        ledger.add([7])
    assert ledger.counted == {7}
    ledger.begin(5)
    ledger.abort(2)
    assert (ledger.waiting, ledger.aborted_flushes) == ((8,), 1)
