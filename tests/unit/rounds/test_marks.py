"""A record of votes that is not the newest one of its node: rolled back, copied, or lost. Such a seat abstains."""

from itertools import count

import pytest
from support.machine_plans import GENESIS, POLICY, make_plan
from support.machine_votes import FakeVoteSigner
from support.machine_world import World

from atoll.core.manifest import Head
from atoll.core.plan import Base
from atoll.core.quorum import MARKS_KEPT, Ballot, Electorate, Promised, VoteRecord
from atoll.core.round_id import RoundId
from atoll.node.rounds.member_answers import MemberAnswers
from atoll.node.rounds.promises import Promises
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

PEERS = ("p0", "p1", "p2")
PLAN = make_plan(PEERS)
BLANK = VoteRecord(0, b"", Ballot(0, 0))


def after(head: Head, epoch: int = 1, **marks: bytes) -> Head:
    """The next head, with these members and their marks."""
    manifest = manifest_pb2.Manifest(
        round=RoundId("r", 1, 0, head.round + 1, 0).to_proto(),
        previous_hash=head.hash,
        contributions=[manifest_pb2.Contribution(peer_id=peer, mark=mark) for peer, mark in marks.items()],
        epoch=epoch,
    )
    return Head(manifest_pb2.CommittedManifest(payload=manifest.SerializeToString(deterministic=True)))


class Life:
    """p0, from its start with a record; its marks have its name in them."""

    def __init__(
        self, name: str, record: VoteRecord | None, head: Head = GENESIS, plan=PLAN, told: Promised | None = None
    ) -> None:
        numbers = count()
        self.promises = Promises("p0", record, head, plan, lambda: f"{name}{next(numbers):07}".encode(), told)
        self.head, self.record = head, record

    @property
    def votes(self) -> bool:
        return self.promises.votes

    def take_part(self, attempt: int = 0) -> bytes:
        """Answer an Open; the mark that others hear."""
        self.record = self.promises.pledge(Ballot(1, attempt))
        assert self.promises.mark in self.record.marks
        return self.promises.mark

    def move(self, head: Head) -> None:
        self.head = head
        self.promises.recall(head, PLAN)

    def commit(self) -> Head:
        """A round that it takes part in."""
        self.move(after(self.head, p0=self.take_part()))
        return self.head


def test_every_head_has_one_mark_and_the_record_knows_the_last_few():
    life = Life("a", BLANK)
    marks = []
    for _ in range(MARKS_KEPT + 3):
        assert life.votes
        mark = life.take_part()
        assert life.take_part(attempt=1) == mark
        again = Life("b", life.record, life.head)  # restarted
        assert (again.votes, again.take_part(attempt=2)) == (True, mark)
        life.move(after(life.head, p0=mark))
        marks.append(mark)
    assert len(set(marks)) == len(marks)
    assert life.record is not None
    assert life.record.marks == tuple(marks[-MARKS_KEPT:])


@pytest.mark.parametrize("rounds", [1, 2, 9])
def test_a_record_that_was_rolled_back_does_not_vote_until_a_round_has_its_mark(rounds):
    life = Life("a", BLANK)
    life.commit()
    old = life.record
    for _ in range(rounds):
        head = life.commit()
    restored = Life("b", old, head)
    assert not restored.votes
    mark = restored.take_part()
    assert restored.record is not None
    assert not restored.record.complete
    again = Life("c", restored.record, restored.head)
    assert (again.votes, again.promises.answered) == (False, Ballot(1, 0))  # nor after a restart
    restored.move(after(restored.head, p0=mark))
    assert restored.votes
    assert Life("d", restored.record, restored.head).votes  # and after a restart, too


def test_a_round_that_went_on_with_the_former_mark_proves_nothing():
    """An earlier attempt at it, with what the earlier life brought, may be committed after all."""
    life = Life("a", BLANK)
    old = (life.commit(), life.record)[1]
    head = life.commit()
    former = life.take_part()
    restored = Life("b", old, head)
    restored.take_part()
    restored.move(after(head, p0=former))
    assert not restored.votes


def test_a_record_of_a_later_round_survives_a_life_at_an_older_state():
    """A node whose checkpoint and manifests are older than its record takes part, and forgets nothing."""
    life = Life("a", BLANK)
    older = life.commit()
    newest = life.commit()
    life.record = life.promises.pledge(Ballot(1, 4), dp.Proposal(payload=b"a result").SerializeToString())
    back = Life("b", life.record, older)
    assert not back.votes
    back.take_part()
    assert back.record is not None
    assert back.record.voted == life.record.voted
    back.move(newest)
    assert (back.votes, back.promises.promised, back.promises.in_doubt) == (True, Ballot(1, 4), b"a result")
    again = Life("c", back.record, newest)
    assert (again.votes, again.promises.in_doubt) == (True, b"a result")


@pytest.mark.parametrize("record_at", ["the head before", "an attempt before", "before the vote"])
def test_what_an_earlier_life_told_the_coordinator_shows_a_backup_of_the_round_under_way(record_at):
    """Its record knows the head's mark, so nothing else shows it."""
    life = Life("a", BLANK)
    head = life.commit()
    backup = life.record
    life.take_part(attempt=1)
    if record_at == "an attempt before":
        backup = life.record
    life.take_part(attempt=2)
    if record_at == "before the vote":
        backup = life.record
    proposal = dp.Proposal(payload=b"a result").SerializeToString()
    life.record = life.promises.pledge(Ballot(1, 2), proposal)
    told = life.record.newest
    assert Life("b", life.record, head, told=told).votes  # it has all that it told
    assert Life("b", backup, head).votes  # the coordinator is away: the window that is left
    restored = Life("c", backup, head, told=told)
    assert not restored.votes
    mark = restored.take_part(attempt=3)
    assert not Life("d", restored.record, head).votes
    restored.move(after(head, p0=mark))
    assert restored.votes


def test_a_directory_at_an_old_head_does_not_vote_on_rounds_that_its_earlier_life_decided():
    """All that it reaches may be as old as it is."""
    life = Life("a", BLANK)
    head, backup = life.commit(), life.record
    for _ in range(3):
        life.commit()
    told = Promised(5, Ballot(1, 0))
    restored = Life("b", backup, head, told=told)
    for _ in range(3):
        assert not restored.votes
        restored.commit()
    assert not restored.votes
    restored.commit()
    assert restored.votes  # of that round its earlier life told nothing


def test_what_was_told_before_a_recovery_is_void():
    base = after(GENESIS, p0=b"of p0 ok")
    recovered = make_plan(PEERS, 2, Base(base.hash, PEERS, base.round, since_version=2))
    record = VoteRecord(2, base.hash, Ballot(1, 0), marks=(b"of p0 ok",))
    assert Life("a", record, base, recovered, told=Promised(9, Ballot(1, 5))).votes
    assert not Life("a", record, base, recovered, told=Promised(2, Ballot(2, 5))).votes


def test_a_lost_record_abstains_until_a_round_has_its_mark():
    lost = Life("a", None)
    assert not lost.votes
    lost.commit()
    assert lost.votes


def test_of_two_that_run_on_one_identity_only_the_one_in_the_manifest_votes():
    first = Life("a", BLANK)
    first.commit()
    copy = Life("b", first.record, first.head)
    head = after(first.head, p0=first.take_part())
    copy.take_part()
    for life in (first, copy):
        life.move(head)
    assert (first.votes, copy.votes) == (True, False)
    head = after(head, p0=copy.take_part())
    first.take_part()
    for life in (first, copy):
        life.move(head)
    assert (first.votes, copy.votes) == (False, True)


def test_a_recovery_that_it_lives_through_makes_all_earlier_votes_void():
    base = after(GENESIS, p0=b"not ours")
    recovered = make_plan(PEERS, 2, Base(base.hash, PEERS, base.round, since_version=2))
    for record in (None, VoteRecord(1, GENESIS.hash, Ballot(1, 0), marks=(b"of p0 ok",))):
        life = Life("a", record, base)
        assert not life.votes
        life.promises.recall(base, recovered)
        assert life.votes
        assert not Life("b", record, base, recovered).votes  # it may have voted since, in a life that is forgotten
        life.promises.pledge(Ballot(2, 0))
        life.promises.recall(after(base, epoch=2, p0=b"not ours"), recovered)
        assert not life.votes


def test_a_record_that_was_at_later_rounds_of_a_void_history_may_have_forgotten_the_mark_of_the_base():
    base = after(GENESIS, p0=b"long ago")
    recovered = make_plan(PEERS, 2, Base(base.hash, PEERS, base.round, since_version=2))
    record = VoteRecord(9, b"h" * 32, Ballot(1, 0), marks=(b"of p0 ok",))
    assert Life("a", record, base, recovered).votes


def test_manifests_of_earlier_builds_have_no_marks():
    for record in (BLANK, VoteRecord(1, GENESIS.hash, Ballot(1, 0))):
        assert Life("a", record, after(GENESIS, p0=b"")).votes


def test_a_seat_that_tells_another_mark_at_one_head_has_forgotten_its_promise():
    marks: dict[str, bytes] = {}

    def asked(attempt: int) -> MemberAnswers:
        round_id, signer = RoundId("r", 1, 0, 1, attempt), FakeVoteSigner("p0")
        electorate = Electorate(frozenset(PEERS))
        return MemberAnswers(round_id, PLAN, electorate, frozenset(PEERS), GENESIS, POLICY, signer, marks=marks)

    for attempt, told in enumerate((b"the same", b"the same", b"a newone")):
        answers = asked(attempt)
        ready = dp.Ready(round=answers.round_id.to_proto(), tokens=1, voter=True, mark=told)
        assert answers.take_ready("p1", ready)
        assert ("p1" in answers.promised) == (told == b"the same")
        answers.proposal = dp.Proposal(payload=b"a result")
        vote = FakeVoteSigner("p1").vote(b"a result", answers.round_id.ballot)
        answers.take_vote("p1", dp.Vote(round=answers.round_id.to_proto(), signature=vote))
        assert ("p1" in answers.votes) == (told == b"the same")
    assert not asked(3).take_ready("p2", dp.Ready(voter=True, mark=b"short"))


@pytest.mark.parametrize("age", [0, 1, 3])
def test_others_go_on_while_a_seat_whose_directory_was_rolled_back_abstains(age):
    world = World(3, seed=age)
    for rounds in range(1, 5):
        assert world.run(60, until=lambda rounds=rounds: world.rounds() >= rounds)
        world.back_up("p0")
    assert world.run(60, until=lambda: world.rounds() >= 7)
    world.kill("p0")
    assert world.roll_back("p0", age)
    restored = world.nodes["p0"]
    assert not restored.machine.votes
    assert "p0" in world.plan.seats(restored.machine.head)
    before = world.rounds()
    assert world.run(60, until=lambda: restored.machine.votes)
    assert world.run(60, until=lambda: restored.disk.record.complete and world.rounds() > before + 1)
