"""Who fetches what: every mixture of donors ends, and only liars are called liars."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.state.fetch_scheduler import FetchScheduler
from atoll.node.state.pieces import Piece

TRUE = b"true"


def pieces_of(sizes: list[int]) -> list[Piece]:
    bounds = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    return [Piece("anchor", i, start, end, TRUE) for i, (start, end) in enumerate(pairwise(bounds))]


class Simulation:
    """Donors whose lies are told by a function; every answer is applied as the shell would."""

    def __init__(self, sizes: list[int], donors: dict, chunk_elements: int = 4) -> None:
        self.pieces = pieces_of(sizes)
        self.donors = donors  # name -> whether its k-th chunk is true
        self.ledger = FetchScheduler(self.pieces, chunk_elements, list(donors))
        self.answers = dict.fromkeys(donors, 0)
        self.bytes: dict[tuple[int, int], bytes] = {}
        self.now = 0.0
        for donor in donors:
            self.ledger.connected(donor)

    def ask(self, donor: str, depth: int = 3) -> bool:
        asked = False
        while self.ledger.is_active(donor) and self.ledger.may_ask(donor, depth):
            if self.ledger.next_chunk(donor, self.now) is None:
                break
            asked = True
        return asked

    def answer(self, donor: str) -> bool:
        chunk = self.ledger.expected(donor) if self.ledger.is_active(donor) else None
        if chunk is None:
            return False
        self.now += 1.0
        honest = self.donors[donor](self.answers[donor])
        self.answers[donor] += 1
        if self.ledger.on_answer(donor, self.now):
            self.bytes[chunk.piece, chunk.index] = TRUE if honest else donor.encode()
            if self.ledger.is_complete(chunk.piece):
                self.check(chunk.piece)
        return True

    def check(self, piece: int) -> None:
        values = [value for (number, _), value in sorted(self.bytes.items()) if number == piece]
        true = all(value == TRUE for value in values)
        digests = [self.bytes[chunk.piece, chunk.index] for chunk in self.ledger.chunks_to_hash(piece, true)]
        self.ledger.on_checked(piece, true, digests)

    def run(self) -> None:
        while not self.ledger.finished and self._everyone_once():
            pass

    def _everyone_once(self) -> bool:
        moved = [self.ask(donor) | self.answer(donor) for donor in self.donors]
        return any(moved)


def always(true: bool):
    return lambda count: true


def until(limit: int):
    return lambda count: count < limit


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.lists(st.one_of(st.none(), st.integers(0, 20)), min_size=1, max_size=6),
    st.data(),
)
def test_one_honest_donor_is_enough_and_only_liars_are_distrusted(sizes, limits, data):
    donors = {f"d{i}": always(True) if limit is None else until(limit) for i, limit in enumerate(limits)}
    world = Simulation(sizes, donors)
    for _ in range(data.draw(st.integers(0, 60))):
        name = data.draw(st.sampled_from(sorted(donors)))
        match data.draw(st.sampled_from(["ask", "answer", "answer", "break", "slow"])):
            case "ask":
                world.ask(name)
            case "answer":
                world.answer(name)
            case "break":
                if world.ledger.is_active(name):
                    world.ledger.disconnected(name)
                    world.ledger.connected(name)
            case "slow":
                world.now += data.draw(st.floats(0, 20))
                world.ledger.release_slow(world.now, 5.0)
    world.run()
    honest = {f"d{i}" for i, limit in enumerate(limits) if limit is None}
    assert not honest & set(world.ledger.reasons)
    if honest:
        assert world.ledger.finished
    if world.ledger.finished:
        assert all(value == TRUE for value in world.bytes.values())
    else:
        assert set(world.ledger.reasons) == set(donors)


def test_a_liar_costs_the_smallest_piece_only():
    world = Simulation([400, 8, 400], {"liar": always(False), "honest": always(True)})
    world.ask("liar")
    world.run()
    assert world.ledger.finished
    assert world.answers["liar"] == 2
    assert world.answers["honest"] == 202


def test_who_has_proved_itself_helps_with_what_another_has_begun():
    world = Simulation([4, 4, 400], {"a": always(True), "b": always(True)})
    world.run()
    assert world.ledger.finished
    assert min(world.answers.values()) >= 50
    assert sum(world.answers.values()) == 102


def test_a_donor_that_turned_liar_is_named_by_the_chunks_that_differ():
    world = Simulation([4, 4, 400], {"turns": until(20), "honest": always(True)})
    world.run()
    assert world.ledger.finished
    assert set(world.ledger.reasons) == {"turns"}
    assert sum(world.answers.values()) <= 2 + 100 + 2 * 100  # both had a hand in it: each is asked for all of it


def test_a_silent_donors_questions_go_to_others_and_its_late_answer_is_not_needed():
    world = Simulation([40, 40], {"silent": always(True), "brisk": always(True)})
    world.ask("silent")
    world.ask("brisk")
    while world.answer("brisk"):
        world.ask("brisk")
    assert not world.ledger.finished
    assert not world.ledger.release_slow(world.now, 1000.0)
    assert world.ledger.release_slow(world.now + 1000, 10.0)
    while world.ask("brisk") | world.answer("brisk"):
        pass
    assert world.ledger.finished
    assert world.answer("silent")
    assert world.ledger.is_active("silent")


def test_a_slow_donor_keeps_no_large_part_to_itself():
    """Two share a link unequally; each answers in order, one chunk after the other."""
    seconds_per_chunk = {"fast": 0.02, "slow": 0.4}
    ledger = FetchScheduler(pieces_of([4, 4, 4000]), 4, list(seconds_per_chunk))
    answers = {}  # donor -> when its oldest question is answered
    deepest = dict.fromkeys(seconds_per_chunk, 0)
    for donor in seconds_per_chunk:
        ledger.connected(donor)
    now = 0.0
    while not ledger.finished:
        for donor, seconds in seconds_per_chunk.items():
            while ledger.may_ask(donor, 32) and ledger.next_chunk(donor, now) is not None:
                answers.setdefault(donor, now + seconds)
        donor = min(answers, key=lambda donor: answers[donor])
        now = answers.pop(donor)
        chunk = ledger.expected(donor)
        if ledger.on_answer(donor, now) and ledger.is_complete(chunk.piece):
            ledger.on_checked(chunk.piece, True, [])
        left = len(ledger._donors[donor].in_flight)
        deepest[donor] = max(deepest[donor], left)
        if left:
            answers[donor] = now + seconds_per_chunk[donor]
    assert deepest["fast"] > 16
    assert deepest["slow"] <= 5
    assert now < 1.05 * 1002 / (1 / 0.02 + 1 / 0.4)  # together, to the end


@pytest.mark.parametrize("turned", [2.9, 14.0])
def test_a_fast_donor_that_turns_slow_holds_nobody_up(turned):
    """It has much on the wire by then, and answers just in time to be called alive."""
    ledger = FetchScheduler(pieces_of([4, 4, 4000]), 4, ["steady", "turning"])
    due = {}  # donor -> when its oldest question is answered
    now, answered = 0.0, dict.fromkeys(("steady", "turning"), 0)

    def seconds(donor: str) -> float:
        return turned if donor == "turning" and answered[donor] > 300 else 0.02

    for donor in answered:
        ledger.connected(donor)
    while not ledger.finished:
        for donor in answered:
            while ledger.may_ask(donor, 32) and ledger.next_chunk(donor, now) is not None:
                due.setdefault(donor, now + seconds(donor))
        donor = min(due, key=due.__getitem__)
        if due[donor] > now + 0.5:  # nothing happens: the shell looks again
            now += 0.5
            continue
        now = due.pop(donor)
        answered[donor] += 1
        chunk = ledger.expected(donor)
        if ledger.on_answer(donor, now) and ledger.is_complete(chunk.piece):
            ledger.on_checked(chunk.piece, True, [])
        if ledger.expected(donor) is not None:
            due[donor] = now + seconds(donor)
    assert now < 1.3 * 1002 * 0.02


def test_the_only_donor_is_never_too_slow():
    world = Simulation([40], {"slow": always(True)})
    world.ask("slow")
    assert not world.ledger.release_slow(1e9, 1.0)
    world.run()
    assert world.ledger.finished


@pytest.mark.parametrize("donors", [{}, {"liar": always(False)}])
def test_nobody_to_ask_is_not_finished(donors):
    world = Simulation([4], donors)
    world.run()
    assert not world.ledger.finished


def test_a_false_piece_of_many_is_fetched_from_one_alone_and_then_the_liar_is_known():
    world = Simulation([4, 4, 4, 16], {"a": always(True), "liar": until(1), "c": always(True)})
    for donor in world.donors:  # each proves itself
        world.ask(donor, 1)
        world.answer(donor)
    for donor in world.donors:  # a begins the large piece, the others help from its tail
        assert world.ask(donor, 1)
    world.answer("liar")
    world.answer("a")
    assert world.ask("a", 1)
    world.answer("a")
    assert world.ledger.release_slow(world.now + 100, 10.0)  # c owes its chunk: a is asked for that one too
    assert world.ask("a", 1)
    world.answer("a")
    assert not world.ledger.finished
    assert not world.ledger.reasons
    world.answer("c")  # late, and not of one piece with what it is asked for now
    assert world.ask("c", 4)
    assert not world.ask("a")
    while world.answer("c"):
        world.ask("c", 4)
    assert world.ledger.finished
    assert set(world.ledger.reasons) == {"liar"}
    assert world.answers["c"] == 1 + 1 + 4


def test_a_piece_whose_donor_left_while_it_was_checked_is_fetched_from_others():
    ledger = FetchScheduler(pieces_of([8]), 4, ["x", "y", "z"])
    for donor in ("x", "y", "z"):
        ledger.connected(donor)
    assert ledger.next_chunk("x", 0.0) is not None
    assert ledger.on_answer("x", 1.0)
    ledger.give_up("x", "it froze")
    while ledger.next_chunk("y", 2.0) is not None:
        assert ledger.on_answer("y", 3.0)
    assert ledger.is_complete(0)
    ledger.give_up("y", "it refused")  # meanwhile
    ledger.on_checked(0, False, [b"x", b"y"])
    assert {ledger.next_chunk("z", 4.0), ledger.next_chunk("z", 4.0)} != {None}


def test_what_a_liar_delivered_elsewhere_is_fetched_again():
    world = Simulation([4, 4, 16], {"a": always(True), "liar": until(1)})
    for donor in world.donors:
        world.ask(donor, 1)
        world.answer(donor)
    for donor in world.donors:
        world.ask(donor, 1)
        world.answer(donor)
    world.ledger.give_up("liar", "found out elsewhere")
    world.run()
    assert world.ledger.finished
    assert world.answers["a"] == 1 + 4
