"""Credit: what nodes contributed to a run, however often they, their keys or the coordinator are replaced."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory_store import MemoryStore
from unit.coordinator.world import RUN, World, hash_of, round_report

from atoll.coordinator.rounds import credits
from atoll.coordinator.runs import admission, deletion, departure, forgetting, identity_rotation, lifecycle, recovery
from atoll.coordinator.services import views
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.run_memory import Commit, ranks_of
from atoll.coordinator.store.records import Credit
from atoll.coordinator.web.status import Logs, status
from atoll.core.identity import Identity
from atoll.core.identity_rotation import Rotation
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb


class Swarm(World):
    """Ann, Bob and Cem train; `commit` commits a round of some of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.train("ann", "bob", "cem", stop_tokens=1_000_000)
        self.previous = self.state.memory[RUN].committed[0].manifest_hash

    def commit(self, *names: str, tokens_each: int = 500, sender: str = "ann") -> mb.RoundReport:
        run = self.run
        report = round_report(
            run.head_round + 1,
            self.previous,
            [self.identities[name] for name in names],
            plan_version=self.plans[-1].version,
            tokens_each=tokens_each,
            committed_before=run.committed_tokens,
        )
        self.say(sender, rounds=[report])
        assert self.run.head_round == run.head_round + 1
        self.previous = hash_of(report)
        return report

    def credit(self) -> dict[str, tuple[int, int]]:
        """Tokens and rounds by name; those of forgotten nodes have the name ""."""
        names = {identity.peer_id: name for name, identity in self.identities.items()} | {"": ""}
        return {names[peer]: (item.tokens, item.rounds) for peer, item in self.state.memory[RUN].credits.items()}

    def stored(self) -> set[Credit]:
        store = MemoryStore()
        store.apply(self.records)
        return set(store.load().credits)


@pytest.fixture
def swarm() -> Swarm:
    return Swarm()


def leave(swarm: Swarm, name: str) -> None:
    swarm.take(departure.leave(swarm.state, swarm.now, swarm.identities[name].peer_id, "done"))
    swarm.hang_up(name)
    swarm.wait(30)


def test_each_round_is_credited_once_and_all_credits_are_the_runs_tokens(swarm: Swarm) -> None:
    first = swarm.commit("ann", "bob", "cem")
    swarm.say("bob", rounds=[first])
    swarm.say("ann", rounds=[first])
    swarm.commit("ann", "bob", tokens_each=700)
    assert swarm.credit() == {"ann": (1200, 2), "bob": (1200, 2), "cem": (500, 1)}
    assert sum(tokens for tokens, _ in swarm.credit().values()) == swarm.run.committed_tokens


def test_a_restart_of_the_coordinator_keeps_credits_and_ranks(swarm: Swarm) -> None:
    swarm.commit("ann", "bob", "cem")
    swarm.commit("ann", "bob")
    before = swarm.state.memory[RUN]
    swarm.restart()
    after = swarm.state.memory[RUN]
    assert (after.credits, after.credit_ranks) == (before.credits, before.credit_ranks)
    assert set(after.credits.values()) == swarm.stored()


def test_the_time_of_the_first_and_of_the_last_round_is_kept(swarm: Swarm) -> None:
    swarm.commit("ann", "bob", "cem")
    began = swarm.now.unix_ms
    swarm.wait(5)
    swarm.commit("ann", "bob")
    ann, cem = (swarm.state.memory[RUN].credits[swarm.identities[name].peer_id] for name in ("ann", "cem"))
    assert (ann.first_ms, ann.last_ms) == (began, swarm.now.unix_ms)
    assert (cem.first_ms, cem.last_ms) == (began, began)


def test_a_new_identity_keeps_the_credit_of_the_old_one(swarm: Swarm) -> None:
    swarm.commit("ann", "bob", "cem")
    old, new = swarm.identities["bob"], Identity.generate()
    late = round_report(2, swarm.previous, [swarm.identities[name] for name in ("ann", "bob")], committed_before=1500)
    swarm.take(identity_rotation.rotate(swarm.state, swarm.now, old.peer_id, Rotation(old.peer_id, new.public_key)))
    swarm.identities["bob"] = new
    assert swarm.credit() == {"ann": (500, 1), "bob": (500, 1), "cem": (500, 1)}
    swarm.say("ann", rounds=[late])  # it committed before the old identity was replaced
    assert swarm.credit() == {"ann": (1000, 2), "bob": (1000, 2), "cem": (500, 1)}
    assert set(swarm.state.memory[RUN].credits.values()) == swarm.stored()


def test_nodes_that_leave_keep_their_credit_and_forgotten_ones_share_a_row(swarm: Swarm) -> None:
    swarm.commit("ann", "bob", "cem")
    swarm.commit("ann", "bob")
    leave(swarm, "cem")
    assert swarm.credit()["cem"] == (500, 1)
    swarm.take(lifecycle.stop(swarm.state, swarm.now, RUN))
    leave(swarm, "bob")
    for name in ("bob", "cem"):
        swarm.take(forgetting.forget(swarm.state, swarm.now, swarm.policy, name))
    assert swarm.credit() == {"ann": (1000, 2), "": (1500, 3)}
    assert set(swarm.state.memory[RUN].credits.values()) == swarm.stored()
    assert swarm.state.memory[RUN].credit_ranks == {swarm.identities["ann"].peer_id: 1}


def test_a_deleted_run_leaves_no_credit(swarm: Swarm) -> None:
    swarm.commit("ann", "bob", "cem")
    swarm.take(lifecycle.stop(swarm.state, swarm.now, RUN))
    for name in ("ann", "bob", "cem"):
        leave(swarm, name)
    swarm.take(deletion.delete(swarm.state, swarm.now, swarm.policy, RUN))
    assert swarm.stored() == set()


def test_a_member_on_probation_is_credited_with_rounds_and_no_tokens(swarm: Swarm) -> None:
    swarm.take(admission.set_probation(swarm.state, swarm.now, "cem", on_probation=True))
    manifest = manifest_pb2.Manifest(
        contributions=[
            manifest_pb2.Contribution(peer_id=swarm.identities[name].peer_id, weight=500, tokens=tokens)
            for name, tokens in (("ann", 500), ("cem", 0))
        ]
        + [manifest_pb2.Contribution(peer_id=swarm.identities["bob"].peer_id)]  # a witness: it brought nothing
    )
    draft = Draft(swarm.state, swarm.now)
    credits.count_round(draft, RUN, manifest, 7)
    swarm.take(draft.done(None))
    assert swarm.credit() == {"ann": (500, 1), "cem": (0, 1)}


def test_rounds_that_a_recovery_made_void_keep_their_credit(swarm: Swarm) -> None:
    first = swarm.commit("ann", "bob", "cem")
    swarm.commit("ann", "bob", "cem")
    for name in ("ann", "bob", "cem"):
        swarm.heads[name] = (1, hash_of(first))
        swarm.say(name)
    swarm.take(recovery.recover(swarm.state, swarm.now, RUN, force=True))
    assert swarm.run.head_round == 1
    assert swarm.credit() == {"ann": (1000, 2), "bob": (1000, 2), "cem": (1000, 2)}


def test_a_base_that_is_known_only_by_its_hash_is_not_counted_again(swarm: Swarm) -> None:
    """Its row is not loaded at a restart if no node has a checkpoint of it; any member can send it again."""
    first = swarm.commit("ann", "bob", "cem")
    for name in ("ann", "bob", "cem"):
        swarm.heads[name] = (1, hash_of(first))
        swarm.say(name)
    swarm.take(recovery.recover(swarm.state, swarm.now, RUN, force=True))
    known = swarm.state.memory[RUN].committed[1]
    draft = Draft(swarm.state, swarm.now)
    draft.remember(RUN, committed={1: Commit(known.manifest_hash, committed_tokens=None)})
    swarm.take(draft.done(None))
    before = swarm.credit()
    swarm.say("ann", rounds=[first])
    assert swarm.state.memory[RUN].committed[1].committed_tokens == 1500  # it was taken
    assert swarm.credit() == before


def test_a_step_of_many_rounds_writes_each_row_once(swarm: Swarm) -> None:
    manifest = manifest_pb2.Manifest(
        contributions=[manifest_pb2.Contribution(peer_id=swarm.identities["ann"].peer_id, weight=5, tokens=5)]
    )
    draft = Draft(swarm.state, swarm.now)
    for moment in range(10):
        credits.count_round(draft, RUN, manifest, moment)
    step = draft.done(None)
    assert [row for row in step.records if isinstance(row, Credit)] == [
        Credit(RUN, swarm.identities["ann"].peer_id, 50, 10, 0, 9)
    ]


def test_a_peer_that_is_unknown_after_a_restore_keeps_a_row_of_its_own(swarm: Swarm) -> None:
    manifest = manifest_pb2.Manifest(contributions=[manifest_pb2.Contribution(peer_id="new", weight=5, tokens=5)])
    draft = Draft(swarm.state, swarm.now)
    credits.count_round(draft, RUN, manifest, 7)
    swarm.take(draft.done(None))
    (shown,) = views.credit_views(swarm.state, RUN, 10)
    assert (shown.peer_id, shown.name, shown.rank, shown.tokens) == ("new", "", 1, 5)


def test_no_round_is_older_than_its_run(swarm: Swarm) -> None:
    members = [swarm.identities[name] for name in ("ann", "bob", "cem")]
    swarm.say("ann", rounds=[round_report(1, swarm.previous, members, committed_unix_ms=1)])
    assert {item.first_ms for item in swarm.state.memory[RUN].credits.values()} == {swarm.run.created_ms}


def test_the_view_names_nodes_and_puts_forgotten_ones_last(swarm: Swarm) -> None:
    swarm.commit("ann", "bob", "cem")
    swarm.commit("ann", "bob", tokens_each=9)
    draft = Draft(swarm.state, swarm.now)
    credits.fold(draft, {swarm.identities["ann"].peer_id})
    swarm.take(draft.done(None))
    shown = views.credit_views(swarm.state, RUN, 10)
    assert [(item.rank, item.name, item.tokens) for item in shown] == [(1, "bob", 509), (2, "cem", 500), (0, "", 509)]
    assert [item.name for item in views.credit_views(swarm.state, RUN, 1)] == ["bob", ""]


def test_the_page_shows_the_first_contributors(swarm: Swarm) -> None:
    swarm.commit("ann", "bob", "cem")
    swarm.commit("ann", "bob")
    (run,) = json.loads(json.dumps(status(swarm.state, swarm.now, Logs(), "1")))["runs"]
    shown = run["contributors"]
    assert (shown["nodes"], shown["tokens"]) == (3, swarm.run.committed_tokens)
    assert [(item["rank"], item["tokens"], item["rounds"]) for item in shown["first"]] == [
        (1, 1000, 2),
        (1, 1000, 2),
        (3, 500, 1),
    ]


@given(st.lists(st.integers(0, 5), max_size=12))
def test_ranks_are_one_more_than_the_number_of_nodes_with_more_tokens(tokens: list[int]) -> None:
    rows = {f"peer{i}": Credit("reef", f"peer{i}", value, 1, 0, 0) for i, value in enumerate(tokens)}
    found = ranks_of(rows | {"": Credit("reef", "", 99, 1, 0, 0)})
    assert found == {peer: 1 + sum(value > row.tokens for value in tokens) for peer, row in rows.items()}
