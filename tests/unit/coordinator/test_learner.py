"""Rounds that nobody reported: one node at a time is asked for them, and only what the votes prove is taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from unit.coordinator.world import RUN, World, hash_of, round_report

from atoll.coordinator.rounds import learner
from atoll.coordinator.runs import recovery
from atoll.coordinator.store.records import Event, Round
from atoll.core.identity import Identity
from atoll.v1 import membership_pb2 as mb

ALL = ("ann", "bob", "cid", "dan")
Told = dict[int, mb.RoundReport]


def trained(names: Iterable[str] = ALL, stop_tokens: int = 10**12) -> World:
    world = World()
    world.train(*names, stop_tokens=stop_tokens)
    return world


def history(world: World, count: int, *, names: Iterable[str] = ALL, signers: Iterable[str] = ALL) -> Told:
    """The next `count` rounds of these nodes."""
    told: Told = {}
    previous = world.state.memory[RUN].committed[world.run.head_round].manifest_hash
    members, voters = ([world.identities[name] for name in some] for some in (names, signers))
    tokens = world.run.committed_tokens
    for number in range(world.run.head_round + 1, world.run.head_round + count + 1):
        told[number] = round_report(number, previous, members, committed_before=tokens, signers=voters)
        told[number].seconds = 0
        previous, tokens = hash_of(told[number]), tokens + 500 * len(members)
    return told


def later(world: World, number: int) -> mb.RoundReport:
    """A round so far ahead that nobody holds the ones before it."""
    return round_report(number, b"x" * 32, [world.identities[name] for name in ALL], committed_before=2000 * number)


def hold(world: World, told: Mapping[int, mb.RoundReport], *names: str) -> None:
    """Heartbeats of nodes whose head is the newest of these rounds."""
    for name in names:
        world.heads[name] = (max(told), hash_of(told[max(told)]))
        world.say(name)


def catch_up(world: World, told: Mapping[int, mb.RoundReport], seconds: float = 60) -> list[str]:
    """Let whoever is asked answer at once; the names of those, in order."""
    asked: list[str] = []
    for _ in range(int(seconds)):
        world.wait(1)
        for _ in range(len(told)):
            if not world.asked_node:
                break
            asked.append(world.asked_node)
            world.send_asked(told)
    return asked


def numbers(world: World) -> list[int]:
    return sorted({row.number for row in world.records if isinstance(row, Round)})


def gap_events(world: World) -> list[str]:
    return [row.message for row in world.records if isinstance(row, Event) and row.kind == "run.gap"]


# --- one after the other -------------------------------------------------------------------------------


def test_in_quiet_times_nobody_is_asked() -> None:
    world = trained()
    for number, report in history(world, 5).items():
        hold(world, {number: report}, *ALL)
        world.wait(1)
        assert not world.asked_node
        world.say("ann", rounds=[report])
        world.wait(3)
        assert not world.asked_node
    assert world.run.head_round == 5


def test_unreported_rounds_are_learned_in_batches_from_one_node() -> None:
    world = trained()
    told = history(world, 100)
    hold(world, told, "bob")
    asked = catch_up(world, told, 10)
    assert (world.run.head_round, world.run.committed_tokens) == (100, 200_000)
    assert (set(asked), len(asked)) == ({"bob"}, -(-100 // learner.MAX_BATCH))
    assert numbers(world) == list(range(1, 101))
    world.wait(60)
    assert not world.asked_node


def test_a_restart_in_the_midst_goes_on_where_it_was() -> None:
    world = trained()
    told = history(world, 50)
    hold(world, told, "bob")
    world.wait(3)
    world.send_asked(told)
    assert world.run.head_round == learner.MAX_BATCH
    world.restart()
    for name in ALL:
        world.connect(name, mb.NODE_STATE_TRAINING)
    catch_up(world, told, 10)
    assert (world.run.head_round, numbers(world)) == (50, list(range(1, 51)))


def test_a_node_that_delivers_nothing_is_passed_over_for_the_next() -> None:
    world = trained()
    told = history(world, 40)
    hold(world, told, "bob", "cid")
    world.wait(3)
    silent = world.asked_node
    world.wait(learner.ANSWER_SECONDS + 1)
    other = world.asked_node
    assert {silent, other} == {"bob", "cid"}
    assert set(catch_up(world, told, 5)) == {other}  # also for the next batch
    assert world.run.head_round == 40
    world.say(silent, manifests=mb.ManifestAnswer(first=1, manifests=[told[1].manifest]))  # late
    assert numbers(world) == list(range(1, 41))


def test_a_node_that_hangs_up_is_passed_over_at_once() -> None:
    world = trained()
    told = history(world, 3)
    hold(world, told, "bob", "cid")
    world.wait(3)
    silent = world.asked_node
    world.hang_up(silent)
    world.wait(0.4)
    assert world.asked_node not in ("", silent)


def test_a_history_with_too_few_votes_is_rejected_and_another_node_is_asked() -> None:
    world = trained()
    true = history(world, 5)
    forged = history(world, 9, names=("ann", "bob"), signers=("ann", "bob"))
    hold(world, forged, "ann")
    world.wait(3)
    world.send_asked(forged)
    assert (world.run.head_round, world.kinds()[-1]) == (0, "round.rejected")
    hold(world, true, "cid")
    assert catch_up(world, true, 5) == ["cid"]
    assert world.state.memory[RUN].committed[5].manifest_hash == hash_of(true[5])


def test_a_liar_cannot_keep_the_coordinator_from_asking_others() -> None:
    world = trained()
    world.heads["ann"] = (2**60, b"l" * 32)
    world.say("ann")
    world.wait(100)
    told = history(world, 70)
    hold(world, told, "cid")
    asked = catch_up(world, told, 15)
    assert (asked[0], world.run.head_round) == ("cid", 70)


def test_of_many_nodes_one_at_a_time_is_asked() -> None:
    names = [f"n{number}" for number in range(64)]
    world = trained(names)
    names.sort(key=lambda name: world.identities[name].peer_id)  # the first seven have the seats
    told = history(world, 40, names=names, signers=names[:4])
    hold(world, told, *names)
    seen = set()
    for _ in range(8):
        world.wait(learner.ANSWER_SECONDS)
        seen.add(world.asked_node)
    assert len(seen - {""}) in (7, 8)
    asked = catch_up(world, told, 5)
    assert (len(set(asked)), world.run.head_round) == (1, 40)


def test_answers_that_are_late_twice_or_out_of_order_change_nothing() -> None:
    world = trained()
    told = history(world, 4)
    hold(world, told, "bob")
    for name in ("ann", "bob"):  # not asked
        world.say(name, manifests=mb.ManifestAnswer(first=1, manifests=[told[1].manifest]))
    assert world.run.head_round == 0
    world.wait(3)
    backwards = [told[number].manifest for number in (1, 3, 2)]
    world.say("bob", manifests=mb.ManifestAnswer(first=1, manifests=backwards))
    assert (world.run.head_round, world.kinds()[-1]) == (1, "round.rejected")
    for _ in range(2):
        world.say("bob", manifests=mb.ManifestAnswer(first=1, manifests=[told[1].manifest, told[2].manifest]))
    assert world.run.head_round == 1
    world.wait(learner.RETRY_SECONDS + 1)
    world.send_asked({number: told[number] for number in (2, 3, 4)})
    assert (world.run.head_round, numbers(world)) == (4, [1, 2, 3, 4])


def test_an_opener_completes_a_round_that_was_learned() -> None:
    world = trained()
    told = history(world, 2)
    hold(world, told, "bob")
    catch_up(world, told, 5)
    before = world.run
    told[1].seconds, told[1].wire_bytes = 2.5, 77
    opener = world.opener_of(told[1])
    for name in (*(name for name in ALL if name != opener), opener, opener):
        world.say(name, rounds=[told[1]])
    (_, completed) = [row for row in world.records if isinstance(row, Round) and row.number == 1]
    assert (completed.seconds, completed.wire_bytes, completed.opener) == (
        2.5,
        77,
        world.identities[opener].peer_id,
    )
    assert world.run == before  # counted once


def test_the_run_finishes_with_a_learned_round() -> None:
    world = trained(stop_tokens=9000)
    told = history(world, 7)
    hold(world, told, "bob")
    catch_up(world, told, 5)
    assert (world.run.state, world.run.head_round, world.run.committed_tokens) == ("FINISHED", 5, 10_000)
    assert not world.asked_node


def test_a_restored_coordinator_learns_rounds_of_plans_that_it_forgot() -> None:
    world = trained()
    members = [world.identities[name] for name in ALL]
    world.put(replace(world.run, plan_floor=1000))
    second = round_report(1, world.state.memory[RUN].committed[0].manifest_hash, members, plan_version=7)
    hold(world, {1: second}, "bob")
    catch_up(world, {1: second}, 5)
    assert (world.run.head_round, world.run.committed_tokens) == (1, 2000)
    world.wait(5)
    unknown = round_report(2, hash_of(second), members, plan_version=2000, committed_before=2000)
    hold(world, {2: unknown}, "bob")
    catch_up(world, {2: unknown}, 5)
    assert world.run.head_round == 1


def test_rounds_signed_by_a_node_that_a_restore_forgot_are_skipped() -> None:
    world = trained()
    stranger, members = Identity.generate(), [world.identities[name] for name in ALL]
    previous = world.state.memory[RUN].committed[0].manifest_hash
    told = {1: round_report(1, previous, members, signers=[*members, stranger])}
    told[2] = round_report(2, hash_of(told[1]), members, committed_before=2000)
    hold(world, told, "ann", "bob", "cid")
    catch_up(world, told, 10)
    assert (world.run.head_round, numbers(world)) == (2, [2])
    assert gap_events(world)[0].startswith("round 1 was not reported by anybody; went on from round 2")


# --- after a gap ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [9000, 10_050, 1_000_000])
@pytest.mark.parametrize("known", [0, 1])
def test_rounds_that_no_node_holds_any_more_are_skipped(number: int, known: int) -> None:
    world = trained()
    for report in history(world, known).values():
        world.say("ann", rounds=[report])
    far = later(world, number)
    hold(world, {number: far}, "ann", "bob", "cid")
    catch_up(world, {number: far}, 10)
    assert (world.run.head_round, world.run.committed_tokens) == (number, 2000 * number + 2000)
    told = f"rounds {known + 1:,} to {number - 1:,} were not reported by anybody; went on from round {number:,}, "
    assert gap_events(world) == [told + "which 3 of 4 nodes hold"]
    assert world.run.rounds_opened == number
    world.restart()
    for name in ALL:
        world.connect(name, mb.NODE_STATE_TRAINING)
    more = history(world, 3)  # the electorate after that round is known
    hold(world, more, "bob")
    catch_up(world, more, 5)
    assert world.run.head_round == number + 3


def test_slow_nodes_are_no_reason_to_skip_rounds() -> None:
    world = trained()
    told = history(world, 3)
    hold(world, told, *ALL)
    asked = set()
    for _ in range(200):
        world.wait(1)  # nobody answers in time
        inquiry = world.state.memory[RUN].inquiry
        assert inquiry is not None
        asked.add((world.asked_node, inquiry.first))
    assert asked - {("", 1)} == {(name, 1) for name in ALL}
    catch_up(world, told, 40)
    assert (numbers(world), gap_events(world)) == ([1, 2, 3], [])


@pytest.mark.parametrize("holders", [("ann",), ("ann", "bob")])
def test_a_round_that_half_of_the_nodes_hold_is_not_taken(holders: tuple[str, ...]) -> None:
    world = trained()
    far = {5000: later(world, 5000)}
    hold(world, far, *holders)
    catch_up(world, far, 100)
    assert (world.run.head_round, gap_events(world)) == (0, [])


def test_nodes_at_different_rounds_agree_by_an_earlier_manifest() -> None:
    world = trained()
    rounds: Told = {5000: later(world, 5000)}
    for number in (5001, 5002):
        before = rounds[number - 1]
        members = [world.identities[name] for name in ALL]
        rounds[number] = round_report(number, hash_of(before), members, committed_before=2000 * number)
    for name, number in (("ann", 5002), ("bob", 5001), ("cid", 5000)):
        hold(world, {number: rounds[number]}, name)
    catch_up(world, rounds, 10)
    assert gap_events(world)[0].endswith("went on from round 5,000, which 3 of 4 nodes hold")
    assert world.run.head_round == 5002
    assert numbers(world) == [5000, 5001, 5002]


def test_a_liar_among_the_holders_does_not_choose_the_round() -> None:
    world = trained()
    true, false = {5000: later(world, 5000)}, {5000: later(world, 6000)}
    false[5000] = round_report(5000, b"y" * 32, [world.identities[name] for name in ALL], committed_before=10**9)
    hold(world, false, "ann")
    hold(world, true, "bob", "cid", "dan")
    for _ in range(200):
        world.wait(1)
        if world.asked_node:
            world.send_asked(false if world.asked_node == "ann" else true)
    assert world.state.memory[RUN].committed[5000].manifest_hash == hash_of(true[5000])


def test_heads_without_manifests_move_nothing() -> None:
    world = trained()
    for name in ALL:
        world.heads[name] = (2**62, b"l" * 32)
        world.say(name)
    catch_up(world, {}, 100)
    assert world.run.head_round == 0


def test_void_rounds_are_neither_learned_nor_taken() -> None:
    world = trained()
    told = history(world, 5)
    for number in (1, 2, 3):
        hold(world, {number: told[number]}, *ALL)
        world.say("ann", rounds=[told[number]])
    for name in ("cid", "dan"):
        world.hang_up(name)
    hold(world, {1: told[1]}, "ann", "bob")
    world.take(recovery.recover(world.state, world.now, RUN, force=True))
    assert world.run.head_round == 1
    hold(world, told, "ann", "bob")  # round 5 was never reported
    catch_up(world, told, 100)
    assert world.run.head_round == 1
