"""The order to write a checkpoint now: who is told which round, and when it counts as written."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.coordinator.world import LAYERS, RUN, World, hash_of, round_report

from atoll.coordinator.runs import checkpoint_orders, lifecycle
from atoll.coordinator.runs.checkpoint_orders import ORDER_SECONDS, PATIENCE_SECONDS, RETARGET_SECONDS, Progress
from atoll.coordinator.state import lookup
from atoll.core.errors import InvalidTransition, NotFound, Unreachable
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import plan_pb2

LAST = len(LAYERS) - 1


class Swarm(World):
    """Nodes that train, and write checkpoints when a test says so."""

    def begin(self, *names: str) -> Swarm:
        self.names = names
        self.train(*names)
        self.hash = hash_of(self.genesis())
        self.commit()
        return self

    def commit(self) -> int:
        """One more round; all nodes hold it."""
        number = self.run.head_round + 1
        members = [self.identities[self.name_of(peer)] for peer in self.plans[-1].members]
        report = round_report(number, self.hash, members, committed_before=self.run.committed_tokens)
        self.hash = hash_of(report)
        for name in self.names:
            self.heads[name] = (number, self.hash)
        self.say(self.opener_of(report), rounds=[report])
        for name in self.names:
            self.say(name)
        assert self.run.head_round == number
        return number

    def order(self, wanted: int = 0) -> Progress:
        found = self.take(checkpoint_orders.order(self.state, self.now, RUN, wanted))
        assert isinstance(found, Progress)
        return found

    def keep_ordering(self, wanted: int, seconds: float) -> Progress:
        """As a waiting operator does."""
        for _ in range(round(seconds)):
            self.wait(1)
            found = self.order(wanted)
        return found

    def told(self, name: str) -> int:
        return checkpoint_orders.round_to_write(self.state, lookup.node(self.state, name))

    def write(self, name: str, number: int, first: int = 0, last: int = LAST, digest: bytes = b"") -> None:
        commit = self.state.memory[RUN].committed.get(number)
        info = mb.CheckpointInfo(
            round=number,
            manifest_hash=digest or (commit.manifest_hash if commit else b"?" * 32),
            bytes=100,
            layers=plan_pb2.Span(first=first, last=last),
        )
        self.say(name, checkpoints=[info], checkpoints_changed=True)


@pytest.fixture
def swarm() -> Swarm:
    return Swarm().begin("ann", "bob")


def test_nodes_are_told_the_newest_round_and_one_whole_checkpoint_of_it_is_enough(swarm: Swarm) -> None:
    assert swarm.told("ann") == 0
    found = swarm.order()
    assert (found.wanted, found.written_round, found.waiting) == (1, 0, ("ann", "bob"))
    assert found.missing == "layers 0-2"
    assert (swarm.told("ann"), swarm.told("bob")) == (1, 1)
    swarm.write("bob", 1)
    found = swarm.order(1)
    assert (found.written_round, [item.size_bytes for item in found.held]) == (1, [100])
    assert (swarm.told("ann"), swarm.told("bob")) == (0, 0)


def test_what_is_on_disk_already_needs_no_order(swarm: Swarm) -> None:
    swarm.write("ann", 1)
    assert swarm.order().written_round == 1
    assert swarm.told("bob") == 0


def test_a_newer_round_counts_and_an_older_one_does_not(swarm: Swarm) -> None:
    swarm.write("ann", 1)
    assert swarm.commit() == 2
    assert swarm.order().written_round == 0
    assert swarm.commit() == 3
    swarm.write("ann", 3)
    assert swarm.order(2).written_round == 3


def test_parts_of_one_round_must_have_all_layers_together(swarm: Swarm) -> None:
    assert swarm.order().wanted == 1
    swarm.write("ann", 1, last=1)
    found = swarm.order(1)
    assert (found.written_round, found.missing, found.waiting) == (0, "layer 2", ("bob",))
    swarm.write("bob", 1, first=2)
    found = swarm.order(1)
    assert (found.written_round, [item.first_layer for item in found.held]) == (1, [0, 2])


def test_parts_of_different_rounds_do_not_count_and_all_nodes_get_a_round_that_is_to_come(swarm: Swarm) -> None:
    swarm.order()
    swarm.write("ann", 1, last=1)
    assert swarm.commit() == 2
    swarm.write("bob", 2, first=2)
    found = swarm.keep_ordering(1, RETARGET_SECONDS + 2)
    assert found.written_round == 0
    assert (swarm.told("ann"), swarm.told("bob")) == (3, 3)
    assert swarm.commit() == 3
    swarm.write("ann", 3, last=1)
    assert swarm.order(1).written_round == 0
    swarm.write("bob", 3, first=2)
    assert swarm.order(1).written_round == 3


def test_while_a_node_still_writes_its_target_stays_for_a_while(swarm: Swarm) -> None:
    swarm.order()
    swarm.write("ann", 1, last=1)
    swarm.commit()
    found = swarm.keep_ordering(1, RETARGET_SECONDS + 2)
    assert found.waiting == ("bob",)
    assert (swarm.told("ann"), swarm.told("bob")) == (1, 1)
    swarm.keep_ordering(1, PATIENCE_SECONDS)
    assert (swarm.told("ann"), swarm.told("bob")) == (3, 3)


def test_a_node_that_never_writes_does_not_keep_the_others_from_one_round() -> None:
    swarm = Swarm().begin("ann", "bob", "cid")
    swarm.order()
    swarm.write("ann", 1, last=1)
    assert swarm.commit() == 2
    swarm.write("bob", 2, first=2)
    assert swarm.keep_ordering(1, PATIENCE_SECONDS + RETARGET_SECONDS).waiting == ("cid",)
    assert (swarm.told("ann"), swarm.told("bob")) == (3, 3)
    assert swarm.commit() == 3
    swarm.write("ann", 3, last=1)
    swarm.write("bob", 3, first=2)
    assert swarm.order(1).written_round == 3


def test_in_a_paused_run_no_node_waits_for_a_round_to_come(swarm: Swarm) -> None:
    swarm.order()
    swarm.write("ann", 1, last=1)
    swarm.commit()
    swarm.write("bob", 2, first=2)
    swarm.keep_ordering(1, RETARGET_SECONDS + 2)
    assert swarm.told("ann") == 3
    swarm.take(lifecycle.pause(swarm.state, swarm.now, RUN))
    swarm.keep_ordering(1, RETARGET_SECONDS + 2)
    assert swarm.told("ann") == 2
    swarm.write("ann", 2, last=1)
    assert swarm.order(1).written_round == 2


def test_an_order_that_nobody_repeats_ends(swarm: Swarm) -> None:
    swarm.order()
    swarm.wait(ORDER_SECONDS - 1)
    assert swarm.told("ann") == 1
    swarm.wait(2)
    assert swarm.told("ann") == 0


def test_a_repetition_renews_it_after_a_restart(swarm: Swarm) -> None:
    swarm.order()
    swarm.restart()
    for name in ("ann", "bob"):
        swarm.connect(name)
    assert swarm.told("ann") == 0
    swarm.order(1)
    assert swarm.told("ann") == 1


def test_claims_of_rounds_that_never_committed_do_not_count(swarm: Swarm) -> None:
    swarm.order()
    swarm.write("ann", 1, digest=b"x" * 32)
    swarm.write("bob", 10**6)
    found = swarm.order(1)
    assert (found.written_round, found.waiting) == (0, ("ann", "bob"))


def test_checkpoints_of_nodes_that_are_gone_do_not_count(swarm: Swarm) -> None:
    swarm.order()
    swarm.write("ann", 1)
    swarm.hang_up("ann")
    assert swarm.order(1).written_round == 0


def test_without_a_round_or_a_node_that_holds_it_the_order_is_refused(swarm: Swarm) -> None:
    with pytest.raises(NotFound):
        swarm.order(2)
    for name in ("ann", "bob"):
        swarm.hang_up(name)
    with pytest.raises(Unreachable, match="no connected node"):
        swarm.order()
    empty = World()
    empty.create_run()
    with pytest.raises(InvalidTransition, match="no round yet"):
        checkpoint_orders.order(empty.state, empty.now, RUN, 0)


def test_seeds_are_not_told(swarm: Swarm) -> None:
    swarm.enrol("sea", swarm.token(roles=("seed",)))
    swarm.order()
    assert swarm.told("sea") == 0


def test_an_earlier_wish_is_kept_beside_a_later_one(swarm: Swarm) -> None:
    """Two operators order at different rounds: the newer order fulfils both."""
    swarm.order()
    swarm.commit()
    swarm.order()
    swarm.order(1)
    swarm.write("ann", 2)
    assert (swarm.order(1).written_round, swarm.order(2).written_round) == (2, 2)


def test_after_a_recovery_to_an_earlier_round_the_order_says_so(swarm: Swarm) -> None:
    swarm.commit()
    swarm.order()
    swarm.put(replace(swarm.run, head_round=1))
    with pytest.raises(NotFound, match="round 2 is not known"):
        swarm.order(2)
    swarm.wait(1)
    assert swarm.told("ann") == 2
