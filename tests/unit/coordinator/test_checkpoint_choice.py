"""Which checkpoints an operator's pull takes: all layers of one round, from as few connected nodes as have them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.coordinator.routed import LAYERS, RoutedWorld
from unit.coordinator.test_recovery_of_routes import pair_of_stages, tell
from unit.coordinator.world import RUN

from atoll.coordinator.runs import checkpoints
from atoll.coordinator.store.records import Checkpoint
from atoll.core.errors import NotFound, Unreachable

LAST = LAYERS - 1


@pytest.fixture
def pair() -> RoutedWorld:
    """A route of two stages after twelve rounds."""
    return pair_of_stages()


def chosen(pair: RoutedWorld, *, round_number: int = 0, node: str = "", unverified: bool = False):
    found = checkpoints.choose_for_pull(pair.state, RUN, round_number, node, unverified=unverified)
    names = [pair.state.nodes[item.peer_id].name for item in found]
    return found[0].round, list(zip(names, [(item.first_layer, item.last_layer) for item in found], strict=True))


def refused(pair: RoutedWorld, error: type, **how) -> str:
    with pytest.raises(error) as refusal:
        chosen(pair, **how)
    return str(refusal.value)


def test_the_newest_round_of_which_all_layers_are_there_is_taken(pair):
    tell(pair, "ann", 12, 8, 4)
    tell(pair, "bob", 8, 4)
    in_order = sorted(pair.spans().items(), key=lambda item: item[1])
    assert chosen(pair) == (8, in_order)
    assert chosen(pair, round_number=4) == (4, in_order)
    tell(pair, "bob", 7, span=(0, LAST))
    assert chosen(pair) == (7, [("bob", (0, LAST))])


def test_missing_layers_are_named_with_the_holders_of_the_others(pair):
    tell(pair, "ann", 8, span=(0, 5))
    tell(pair, "bob", 8, 4, span=(9, 11))
    told = refused(pair, NotFound)
    assert "layers 6-8 of round 8" in told
    assert "ann 0-5, bob 9-11" in told
    assert "layers 0-8 of round 4" in refused(pair, NotFound, round_number=4)
    assert "layers 6-11 of round 8" in refused(pair, NotFound, node="ann")
    assert "reports a checkpoint" in refused(pair, NotFound, round_number=5)


def test_the_round_that_lacks_least_is_named(pair):
    tell(pair, "ann", 12, 8, span=(0, 5))
    tell(pair, "bob", 8, span=(6, 10))
    assert "layer 11 of round 8" in refused(pair, NotFound)


def test_disconnected_holders_and_missing_layers_give_different_errors(pair):
    tell(pair, "ann", 8)
    tell(pair, "bob", 8)
    pair.hang_up("bob")
    told = refused(pair, Unreachable)
    assert "round 8" in told
    assert told.endswith("bob")


def test_rounds_of_the_same_number_and_another_history_are_not_mixed(pair):
    tell(pair, "ann", 8)
    tell(pair, "bob", 8)
    peer = pair.identities["bob"].peer_id
    (held,) = pair.state.checkpoints[peer]
    other = Checkpoint(**{**vars(held), "manifest_hash": b"f" * 32})
    pair.state.checkpoints[peer] = (other,)
    assert "of round 8" in refused(pair, NotFound, unverified=True)


spans = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted), max_size=7)


@given(spans)
def test_a_cover_has_every_layer_with_as_few_as_can_be(held):
    items = [Checkpoint(f"peer-{i}", 3, RUN, b"h", 1, 0, 0, first, last) for i, (first, last) in enumerate(held)]
    found = checkpoints.fewest_covering(items, 6)
    everything = set(range(6))
    assert bool(found) is (everything <= {layer for item in items for layer in item.layers})
    if found:
        assert everything == {layer for item in found for layer in item.layers}
        assert [item.first_layer for item in found] == sorted(item.first_layer for item in found)
        for leave_out in found:
            rest = {layer for item in found if item is not leave_out for layer in item.layers}
            assert rest != everything
